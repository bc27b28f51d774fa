"""Names of models and datasets are looked up on a hub that is there, absent or switched off."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny import save_tiny

from trl.cli.files import load_dataset_source
from trl.sources import (
    check_model_name,
    is_cached,
    nearest_path,
    offline_variable,
    why_not_on_hub,
)


@contextmanager
def hub(known):
    """A hub that has some models; yields its address and the paths it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            name = self.path.removeprefix("/api/models/")
            self.send_response(200 if name in known else 404)
            if name not in known:
                self.send_header("X-Error-Code", "RepoNotFound")
            body = json.dumps({"id": name, "_id": "0", "tags": [], "siblings": []}).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Switch the hub on, at an address at which nothing answers."""

    def at(address):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    at("http://127.0.0.1:9")
    return at


@pytest.mark.parametrize("name", ["tiny-modl", "someone/tiny-modl"])
def test_a_hub_that_cannot_be_reached_is_asked_once(online, tmp_path, name):
    (tmp_path / "tiny-model").mkdir()
    begin = time.monotonic()
    with pytest.raises(FileNotFoundError, match="and the hub cannot be reached") as error:
        check_model_name(name)
    assert time.monotonic() - begin < 5
    assert ("Did you mean tiny-model?" in str(error.value)) == (name == "tiny-modl")
    with pytest.raises(ValueError, match=r"there is no such folder, and the hub cannot be reached"):
        load_dataset_source("promts")
    assert time.monotonic() - begin < 5


def test_names_on_the_hub_are_accepted_and_others_refused(online, tmp_path):
    with hub({"someone/model", "gpt2"}) as (address, asked):
        online(address)
        check_model_name("someone/model")
        check_model_name("gpt2")
        with pytest.raises(FileNotFoundError, match="the hub has no such model, or a private one"):
            check_model_name("someone/modle")
        assert len(asked) == 3
        reason = why_not_on_hub("someone/rows", "dataset")
        assert reason.endswith("the hub has no such dataset, or a private one")


def test_a_path_is_never_looked_for_on_the_hub(online, tmp_path):
    save_tiny(tmp_path / "run" / "checkpoint-2")
    with hub({"tiny-model"}) as (address, asked):
        online(address)
        check_model_name("run/checkpoint-2")
        for name in ("./absent", "a/b/c", str(tmp_path / "x"), "~/nothing/here"):
            with pytest.raises(FileNotFoundError, match="there is no such folder"):
                check_model_name(name)
        with pytest.raises(OSError, match="is a file; give the folder that it is in: 'run/check"):
            check_model_name("run/checkpoint-2/model.safetensors")
        with pytest.raises(OSError, match=r"'run' has no config.json. Did you mean run/checkp"):
            check_model_name("run")
        assert asked == []


def test_a_hub_that_is_switched_off_is_named_by_its_variable(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert offline_variable() == "TRANSFORMERS_OFFLINE=1"
    assert why_not_on_hub("a/b").endswith("and TRANSFORMERS_OFFLINE=1 switches the hub off")
    check_model_name("a/b")  # which may be in the cache
    assert not is_cached("a/b")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny-modl", "tiny-model"),
        ("prompt", "prompts.jsonl"),
        ("deep/er/x", None),
        ("qqqq", None),
        ("tiny-model/checkpoint-30", "tiny-model/checkpoint-3"),
    ],
)
def test_the_nearest_path(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-model" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "prompts.jsonl").touch()
    found = nearest_path(name)
    assert (None if found is None else str(found)) == expected
    if expected == "prompts.jsonl":
        assert nearest_path(name, folders_only=True) is None
