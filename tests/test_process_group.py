"""Processes that were launched together but are not connected do not train alone."""

from types import SimpleNamespace

import pytest
import torch

from trl.process_group import (
    LAUNCHED_PROCESSES,
    check_not_alone,
    has_accelerator,
    launched_on_cpu,
    launched_processes,
)


@pytest.fixture
def environment(monkeypatch):
    """Sets variables of a launcher; those of the process that runs the tests are gone."""
    others = ("MASTER_ADDR", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE")
    for name in (*LAUNCHED_PROCESSES, *others):
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("name", LAUNCHED_PROCESSES)
def test_one_of_several_processes_does_not_train_alone(environment, name):
    environment(**{name: "1"})
    check_not_alone(1)
    environment(**{name: "3"})
    assert launched_processes() == (name, 3)
    check_not_alone(3)
    with pytest.raises(ValueError, match=f"{name}=3: this process was launched as one of 3 but"):
        check_not_alone(1)


def test_the_largest_group_counts(environment):
    """`torchrun` on each of two nodes that do not know of each other."""
    environment(WORLD_SIZE="1", SLURM_STEP_NUM_TASKS="2")
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS=2: this process was launched as"):
        check_not_alone(1)


def test_a_terminal_of_srun_runs_one_process(environment, monkeypatch):
    environment(SLURM_STEP_NUM_TASKS="2")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    check_not_alone(1)


def test_processes_meet_on_cpus_where_there_is_nothing_else(environment, monkeypatch):
    assert not launched_on_cpu()
    environment(ACCELERATE_USE_CPU="True")
    assert launched_on_cpu()
    environment(ACCELERATE_USE_CPU="False", WORLD_SIZE="2")
    assert not launched_on_cpu()  # they have no address to meet at
    environment(MASTER_ADDR="127.0.0.1")
    assert launched_on_cpu() is not has_accelerator()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    assert not launched_on_cpu()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is what shards need")
def test_shards_do_not_fall_back_to_cpus(environment):
    environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", ACCELERATE_USE_FSDP="true")
    assert not launched_on_cpu()
    with pytest.raises(ValueError, match="FSDP needs a GPU, and this machine has none. On CPUs, "):
        check_not_alone(1)
