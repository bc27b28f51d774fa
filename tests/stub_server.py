"""An HTTP server with canned answers, for what a real one would take long to bring about."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from trl.generation.vllm.server.client import PROTOCOL
from trl.generation.vllm.server.secret import (
    REQUEST_HEADER,
    RESPONSE_HEADER,
    WEIGHTS_ROUTE,
    SignedRequest,
    shared_secret,
)

FACTS = {"protocol": PROTOCOL, "vllm": "0.32.0", "shape": {}, "dtype": "float32", "context": 64}
FACTS |= {"logprobs_mode": "processed_logprobs", "workers": 1, "gpu": None}
HEALTHY = {"/health": [(200, "")]}


def workers(**answers):
    """Answers of workers by the name of the method."""

    def answer(body):
        found = answers[body["method"]]
        return {"results": [found(*body["args"]) if callable(found) else found]}

    return [(200, answer)]


def completed(body):
    """Completions of one token, which tell prompt and place."""
    choice = {"finish_reason": "length", "logprobs": {"token_logprobs": [-0.5]}}
    place = body["prompt"][0]
    return {"choices": [choice | {"index": n, "token_ids": [place + n]} for n in range(body["n"])]}


def routes(**changes):
    """Of a server that was started for training."""
    calls = {
        "trl_describe": FACTS,
        "trl_held": [],
        "trl_join": None,
        "trl_prove": [None, None],
    } | changes
    return HEALTHY | {"/collective_rpc": workers(**calls), "/v1/completions": [(200, completed)]}


class Stub:
    """`routes` maps a path to answers (status, body), of which the last is repeated.

    A body that is a function gets the request's own. `seen` lists (path, body). `proves` says
    whether answers carry the proof of the secret.
    """

    def __init__(self, routes):
        self.routes = {path: list(answers) for path, answers in routes.items()}
        self.seen = []
        self.proves = True
        self.url = ""

    def answer(self, path, body):
        self.seen.append((path, body))
        answers = self.routes.get(path, [(404, {"detail": "Not Found"})])
        status, found = answers.pop(0) if len(answers) > 1 else answers[0]
        return status, found(body) if callable(found) else found


@contextmanager
def stub_server(routes):
    stub = Stub(routes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size) if size else None
            body = json.loads(body) if body and self.path != WEIGHTS_ROUTE else body
            status, found = stub.answer(self.path, body)
            text = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            with suppress(ConnectionError):  # the client may not have waited
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                if stub.proves:
                    nonce = self.headers[REQUEST_HEADER].split(":")[1]
                    claim = SignedRequest(shared_secret(), "", "", "", "", nonce)
                    self.send_header(RESPONSE_HEADER, claim.sign_response(status, text))
                self.end_headers()
                self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
