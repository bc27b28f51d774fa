"""Real launches on a machine without GPUs: processes form a group, or end with an error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from workspace import environment, run_python, write_inputs

import trl

SCRIPT = Path(__file__).with_name("launched_script.py")
CONFIGS = Path(trl.__file__).parent / "accelerate_configs"
ACCELERATE = ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
WORDS = (
    *("rloo", "--model_name_or_path", "tiny-model", "--dataset_name", "prompts.jsonl"),
    *("--reward_funcs", "rewards.exact", "--output_dir", "out", "--max_steps", "1"),
    *("--num_generations", "4", "--max_completion_length", "4", "--report_to", "none"),
    *("--per_device_train_batch_size", "2", "--save_strategy", "no"),
)
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="processes would use the GPUs"),
]


def run(words, folder, **variables):
    """Run `python WORDS` with more environment variables."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment(folder) | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "words", [["--num_processes", "2"], ["--accelerate_config", "multi_cpu"]], ids=lambda x: x[-1]
)
def test_a_command_trains_on_a_group_of_cpu_processes(tmp_path, words):
    write_inputs(tmp_path)
    done = run_python(["-m", "trl", *WORDS, *words, "--main_process_port", "0"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("each update: ") == 1
    assert "on 2 ranks" in done.stdout
    assert done.stdout.count("1 of 1 steps done") == 1
    assert json.loads((tmp_path / "out" / "run.json").read_text())["processes"] == 2
    completions = (tmp_path / "out" / "completions" / "train.jsonl").read_text().splitlines()
    assert len(completions) == 4  # those of both ranks, once


@pytest.mark.parametrize(
    "launcher",
    [[*ACCELERATE, "--config_file", CONFIGS / "multi_cpu.yaml"], TORCHRUN],
    ids=["accelerate", "torchrun"],
)
def test_scripts_train_on_a_group_of_cpu_processes(tmp_path, launcher):
    done = run([*launcher, SCRIPT], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank} of 2 on cpu:0 among [0, 1]" in done.stdout


def test_a_script_that_is_launched_for_shards_is_refused_without_a_gpu(tmp_path):
    config = ["--config_file", CONFIGS / "fsdp2.yaml", "--num_processes", "2"]
    done = run([*ACCELERATE, *config, SCRIPT], tmp_path)
    assert done.returncode != 0
    assert "rank" not in done.stdout
    assert (
        "ValueError: WORLD_SIZE=2: this process was launched as one of 2 but is not connected to "
        "the others, so each would train alone in the same output folder. FSDP needs a GPU, and "
        "this machine has none. On CPUs, launch with the configuration multi_cpu"
    ) in done.stderr


def test_a_task_of_slurm_does_not_train_alone(tmp_path):
    """`srun python script.py` connects nothing."""
    done = run([SCRIPT], tmp_path, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert done.returncode == 1
    assert "rank" not in done.stdout
    assert "ValueError: SLURM_STEP_NUM_TASKS=2: this process was launched as one of 2" in (
        done.stderr
    )
    assert "remove SLURM_STEP_NUM_TASKS from the environment" in done.stderr
