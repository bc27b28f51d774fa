"""The example scripts that generate run to their end."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from workspace import ROOT, run_forked, write_inputs

SCRIPTS = ROOT / "examples" / "scripts"
SHORT = ["--max_steps", "1", "--per_device_train_batch_size", "2", "--max_completion_length", "4"]
SHORT += ["--use_cpu", "--bf16", "false", "--report_to", "none", "--output_dir", "output"]


class Judge(BaseHTTPRequestHandler):
    """Prefers the second completion, over the protocol of chat completions."""

    asked: list[str] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body["messages"][0]["content"])
        answer = json.dumps({"choices": [{"message": {"content": " 1\n"}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_online_dpo_asks_a_server(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    words = ["--model_name_or_path", "tiny-model", "--dataset_name", "prompts.jsonl"]
    try:
        done = run_forked(
            [SCRIPTS / "online_dpo.py", *words, *SHORT, "--judge_url", url], write_inputs(tmp_path)
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Question: 1+2=" in Judge.asked[-1]
    lines = (tmp_path / "output" / "completions" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["advantage"] for line in lines] == [-1.0, 1.0] * 2
    assert (tmp_path / "output" / "model.safetensors").exists()


@pytest.mark.slow
def test_ppo_learns(tmp_path):
    words = ["--model_name_or_path", "tiny-model", *SHORT, "--max_steps", "40"]
    words += ["--per_device_train_batch_size", "32", "--num_ppo_epochs", "2", "--beta", "0"]
    words += ["--learning_rate", "0.01", "--lr_scheduler_type", "constant", "--seed", "1"]
    done = run_forked([SCRIPTS / "ppo.py", *words], write_inputs(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "output" / "completions" / "train.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert sum(rewards[:32]) / 32 < 0.3
    assert sum(rewards[-32:]) / 32 > 0.7
    assert (tmp_path / "output" / "value_model" / "model.safetensors").exists()
