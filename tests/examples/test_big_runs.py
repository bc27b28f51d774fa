"""Runs that no test can make: their files are legal, their plans fit, their launcher launches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forks import DEADLINE
from workspace import ROOT, option_problems, write_inputs

from trl.cli.launch import launch_options, split_arguments
from trl.cli.memory_plan import make_parser, plan_of

CONFIGS = ("rloo_7b_8_gpus", "rloo_70b_64_gpus")
SLURM = ROOT / "examples" / "slurm" / "train.sh"
# What stands in for SLURM: two "machines" on this one, side by side.
SRUN = """#!/bin/sh
shift
SLURM_NODEID=1 "$@" > second.log 2>&1 & second=$!
SLURM_NODEID=0 "$@"; first=$?
wait $second || exit 1
exit $first
"""


@pytest.mark.parametrize("name", CONFIGS)
def test_options_exist_and_the_plan_fits(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / "examples" / "cli_configs" / f"{name}.yaml"
    config = yaml.safe_load(path.read_text())
    assert option_problems(config) == []
    parser = make_parser("rloo")
    arguments = split_arguments(parser, ["--config", str(path)])
    options = launch_options(arguments.launcher_argv)
    plan = plan_of(parser, parser.read(arguments.script_argv).values, options)
    assert plan.fits()
    assert plan.run.sharding.ranks == options["num_processes"] == plan.run.processes
    assert plan.run.rows * plan.run.processes // plan.run.group_size == 128  # prompts an update
    billions = int(name.split("_")[1].removesuffix("b"))
    assert plan.model.parameters == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "accelerate_configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_configurations_of_several_machines(path):
    options = launch_options(["--config_file", str(path)])
    assert (options["num_machines"], options["num_processes"]) == (8, 64)
    assert options["use_deepspeed"] or options["use_fsdp"]


def test_the_committed_plans_are_those_of_the_command(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import big_plans

    assert big_plans.PAGE.read_text(encoding="utf-8") == big_plans.page()


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_the_launcher_is_legal_shell():
    subprocess.run(["bash", "-n", SLURM], check=True)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_machines(tmp_path, free_port):
    write_inputs(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    write_program(programs / "srun", SRUN)
    write_program(programs / "scontrol", "#!/bin/sh\necho 127.0.0.1\nseq 100000\n")
    write_program(programs / "trl", f'#!/bin/sh\nexec {sys.executable} -m trl "$@"\n')
    config = {
        "model_name_or_path": "tiny-model",
        "dataset_name": "prompts.jsonl",
        "reward_funcs": ["rewards.exact"],
        "output_dir": "output",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 4,
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "accelerate_config": "multi_cpu",
        "report_to": "none",
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    slurm = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    ours = {"CONFIG": "train.yaml", "GPUS": "1", "PORT": str(free_port), "OMP_NUM_THREADS": "1"}
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", SLURM, "--learning_rate", "2e-5"],
        cwd=tmp_path,
        env=os.environ | slurm | ours | paths,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    second = Path(tmp_path, "second.log").read_text()
    assert done.returncode == 0, done.stderr[-2000:] + second[-2000:]
    state = yaml.safe_load((tmp_path / "output" / "completions" / "train.jsonl").open().readline())
    assert state["step"] == 0
    lines = (tmp_path / "output" / "completions" / "train.jsonl").read_text().splitlines()
    assert len(lines) == 8  # four completions of each machine
