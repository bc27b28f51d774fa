"""The commands of the documentation, as they are: training with vLLM in both modes."""

import json

import pytest
from shared_vllm import needs_vllm
from vllm_server import free_port, model_folder, shared_server
from workspace import run_trl_forked

from examples.quickstart import copying

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.slow]
REWARD = """
def digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""
OPTIONS = """
--reward_funcs rewards.py:digits --use_vllm true --use_cpu --bf16 false
--num_generations 8 --per_device_train_batch_size 32 --max_completion_length 4 --max_steps 20
--learning_rate 1e-2 --lr_scheduler_type constant --logging_steps 1 --save_strategy no
--report_to none --gradient_checkpointing false --vllm_probe_syncs 5
"""


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_one_command_trains(tmp_path, mode):
    copying.write(tmp_path / "data")
    (tmp_path / "rewards.py").write_text(REWARD)
    words = ["rloo", "--model_name_or_path", str(model_folder()), "--output_dir", "run"]
    words += ["--dataset_name", "data", "--vllm_mode", mode, *OPTIONS.split()]
    if mode == "server":
        shared_server().connect()
        words += ["--vllm_server_host", "localhost", "--vllm_group_port", str(free_port())]
        words += ["--vllm_server_port", str(shared_server().port)]
    done = run_trl_forked(words, tmp_path, vllm=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "completions" / "train.jsonl").read_text().splitlines()
    rewards = {}
    for row in map(json.loads, lines):
        rewards.setdefault(row["step"], []).append(row["reward"])
    means = [sum(found) / len(found) for _, found in sorted(rewards.items())]
    assert len(means) == 20
    assert sum(means[:3]) / 3 < 0.3 and sum(means[-3:]) / 3 > 0.6, means
