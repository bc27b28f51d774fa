"""`trl rloo --accelerate_config NAME` on two processes, for what shards the weights."""

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from workspace import run_trl_forked, write_inputs

sys.path.insert(0, str(Path(__file__).parent))

from engines import ON_CPU, SHARDED

WORDS = (
    *("rloo", "--model_name_or_path", "tiny-model", "--dataset_name", "prompts.jsonl"),
    *("--reward_funcs", "rewards.exact", "--output_dir", "out", "--max_steps", "2"),
    *("--num_generations", "4", "--max_completion_length", "6", "--report_to", "none"),
    *("--beta", "0.1", "--learning_rate", "0.01", "--bf16", "false", "--save_strategy", "no"),
    *("--num_processes", "2", "--mixed_precision", "no"),
)
# Both need a device that is not the CPU.
ONLY_ON_DEVICES = {
    "fsdp1": ("--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_sync_module_states", "false"),
    "fsdp2": ("--fsdp_cpu_ram_efficient_loading", "false"),
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("engine", SHARDED)
def test_training_by_the_command_line(tmp_path, engine):
    folder = write_inputs(tmp_path)
    words = [*WORDS, "--accelerate_config", engine, *ONLY_ON_DEVICES.get(engine, ())]
    done = run_trl_forked(words, folder, **ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "out" / "completions" / "train.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert sorted(set(steps)) == [0, 1] and len(steps) % 2 == 0
    saved, loaded = (
        safe_open(folder / name / "model.safetensors", "pt") for name in ("out", "tiny-model")
    )
    assert set(saved.keys()) == set(loaded.keys())
    moved = 0.0
    for name in loaded.keys():  # noqa: SIM118
        before, after = loaded.get_tensor(name), saved.get_tensor(name)
        assert before.shape == after.shape, name
        moved += float((after - before).abs().sum())
    assert moved > 0.0


@pytest.mark.distributed
@pytest.mark.slow
def test_rows_are_divided_by_the_command_line(tmp_path):
    folder = write_inputs(tmp_path)
    options = (
        *("--model_name_or_path", "tiny-model", "--dataset_name", "prompts.jsonl"),
        *("--dataset_text_field", "prompt", "--max_steps", "2", "--logging_steps", "1"),
        *("--bf16", "false", "--mixed_precision", "no", "--save_strategy", "no"),
        *("--report_to", "none", "--num_processes", "2", "--accelerate_config", "fsdp2_cp"),
        *("--parallelism_config_dp_shard_size", "1", *ONLY_ON_DEVICES["fsdp2"]),
    )
    done = run_trl_forked(["sft", *options, "--output_dir", "out"], folder, **ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [json.loads(x) for x in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    # Two ranks have the same 8 rows of 4 trained tokens: they count once.
    assert [log["num_tokens"] for log in logs if "loss" in log] == [40, 80]
