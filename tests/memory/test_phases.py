"""What is measured of the phases of a training step."""

import torch
from online_runs import make_trainer
from tiny import tiny_model

from trl.memory.options import MemoryOptions
from trl.memory.phases import Phases

PHASES = ("generation", "scoring", "rewards", "forward", "backward")


def test_phases_share_the_switch_of_recovery():
    phases = Phases(MemoryOptions(), torch.device("cpu"))
    assert phases.adaptive("scoring", alone=True).disabled
    assert not phases.adaptive("rewards").disabled
    off = Phases(MemoryOptions(recover_from_oom=False), torch.device("cpu"))
    assert off.adaptive("rewards").disabled


def test_each_phase_is_measured_and_logged(tmp_path):
    trainer = make_trainer(
        tmp_path,
        num_iterations=2,
        log_memory=True,
        max_steps=2,
        beta=0.1,
        ref_model=tiny_model(seed=1),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for phase in PHASES:
        assert logs[0][f"memory/{phase}/peak_gb"] > 0.0, phase
    assert "memory/generation/peak_gb" not in logs[1], "the second update uses the same round"
    for phase in ("forward", "backward"):
        assert logs[1][f"memory/{phase}/peak_gb"] > 0.0


def test_nothing_is_measured_if_not_asked_to(tmp_path):
    make = make_trainer(tmp_path)
    trainer = make
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry}
    assert not [name for name in names if name.startswith("memory")]
    assert not (tmp_path / "memory.jsonl").exists()
