"""Which files an update runs: few, and `docs/how_a_step_works.md` names them."""

import sys
from pathlib import Path

import dpo_runs
import online_runs
import pytest
import sft_runs
from transformers import TrainerCallback

import trl

PACKAGE = Path(trl.__file__).parent
PAGE = PACKAGE.parent / "docs" / "how_a_step_works.md"
# What computes; the files of a step are above.
BELOW = ("models", "ops", "generation", "memory")
STEPS = {
    "RLOO": (lambda folder: online_runs.make_trainer(folder, **RLOO), 28),
    "DPO": (lambda folder: dpo_runs.make_trainer(folder, **LOGGED), 16),
    "SFT": (lambda folder: sft_runs.make_trainer(folder, **LOGGED), 13),
}
LOGGED = {"max_steps": 2, "logging_steps": 5}
RLOO = LOGGED | {"beta": 0.2, "script": None}


class Watch(TrainerCallback):
    """Notes the files whose code the second update runs."""

    def __init__(self):
        self.files = set()

    def on_step_end(self, args, state, control, **others):
        sys.setprofile(self._note if state.global_step == 1 else None)

    def on_train_end(self, args, state, control, **others):
        sys.setprofile(None)

    def _note(self, frame, event, argument):
        self.files.add(frame.f_code.co_filename)


@pytest.mark.parametrize("name", STEPS)
def test_an_update_reads_straight_down(tmp_path, name):
    make, most = STEPS[name]
    trainer = make(tmp_path)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    files = {Path(file) for file in watch.files if file.startswith(f"{PACKAGE}/")}
    used = sorted(str(file.relative_to(PACKAGE)) for file in files)
    above = [file for file in used if not file.startswith(BELOW)]
    assert len(above) <= most, above
    page = PAGE.read_text(encoding="utf-8")
    assert [file for file in above if f"`{file}`" not in page] == []
