import re

import pytest
import torch
from online_runs import dataset, make_trainer, weights
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState
from transformers.utils import logging

from trl.progress import begin, finish
from trl.trainer.display import (
    PlainProgressCallback,
    RichProgressCallback,
)
from trl.trainer.rloo_config import RLOOConfig


def trained(tmp_path, callback):
    """Two steps whose rewards are 0, with evaluations."""
    trainer = make_trainer(
        tmp_path,
        callbacks=[callback],
        reward=lambda completions, **kwargs: [0.0] * len(completions),
        eval_dataset={"small": dataset(["xy"])},
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=2,
        max_steps=2,
        save_strategy="steps",
    )
    trainer.train()
    return trainer


EVALUATION = r"step 1/2  evaluation of small:  reward 0  length \d+(\.\d+)?"
CLOCK = r"\d:\d\d:\d\d elapsed"


def terminal(callback, width):
    """Let the callback draw in a terminal of this width, without escape codes."""
    callback._console = Console(force_terminal=True, width=width)
    return callback


def test_a_run_in_a_terminal(tmp_path, capsys):
    logging.enable_progress_bar()  # commands switch it off
    callback = terminal(RichProgressCallback(), 120)
    trained(tmp_path, callback)
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", capsys.readouterr().out)
    last = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("step 2/2  ━")][-1]
    assert re.fullmatch(rf"step 2/2  ━+  ETA 0:00:00  reward 0  length \S+  {CLOCK} *", last)
    assert re.search(f"{EVALUATION} *\n", shown)
    assert "evaluation " in shown
    assert "Writing" not in shown and logging.is_progress_bar_enabled()
    assert callback._drawing is None


def drawing(tmp_path, step=3):
    """A callback that draws step 3 of 500, one step after it began."""
    callback = RichProgressCallback()
    state = TrainerState(max_steps=500, global_step=step - 1)
    args = RLOOConfig(str(tmp_path), use_cpu=True, report_to="none")
    state.is_world_process_zero = True
    callback.on_train_begin(args, state, TrainerControl())
    callback._started -= 40.0  # a step that took 40 seconds
    state.global_step = step
    callback.on_step_end(args, state, TrainerControl())
    callback.on_log(args, state, TrainerControl(), logs={"reward": 0.5, "loss": 1e-9})
    return callback


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_step_and_remaining_time_come_first(tmp_path, width):
    callback = drawing(tmp_path)
    begin("generation", 64)
    finish(12)
    line = callback._line(width)
    callback.close()
    assert len(line) <= width
    parts = ["step 3/500", "ETA 5:31:", "generating 12/64", "reward 0.5", "elapsed"]
    known = [part for part in parts if part in line]
    assert known == parts[: {20: 1, 40: 2, 80: 5, 120: 5}[width]], line
    assert "loss" not in line


def test_an_evaluation_is_shown_beside_the_step(tmp_path):
    callback = drawing(tmp_path)
    for _ in range(2):
        callback.on_prediction_step(
            None, callback._state, TrainerControl(), eval_dataloader=[1, 2, 3]
        )
    line = callback._line(40)
    callback.close()
    assert line.startswith("step 3/500  evaluation 2/3")
    assert callback._line(40) == ""


def test_a_resumed_run_says_so_once(tmp_path, capsys, monkeypatch):
    """Beside the display of a run in a batch system."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    changes = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "disable_tqdm": False}
    make_trainer(tmp_path, **changes).train()
    capsys.readouterr()
    make_trainer(tmp_path, **changes).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "resumed" in line] == [
        f"resumed from {tmp_path / 'checkpoint-2'}: step 2 of 3, epoch 1.00"
    ]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("callback", [RichProgressCallback, PlainProgressCallback])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_rewards_that_are_all_missing(tmp_path, capsys, callback, value):
    """A function may return None for every completion of a log interval."""
    trainer = make_trainer(
        tmp_path,
        callbacks=[callback()],
        reward=lambda completions, **kwargs: [value] * len(completions),
        logging_steps=1,
        max_steps=1,
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert "reward -" in capsys.readouterr().out


def test_plain_lines(tmp_path, capsys):
    trainer = trained(tmp_path, PlainProgressCallback())
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step ")]
    clock = rf"{CLOCK}, \d:\d\d:\d\d left"
    expected = ["step 1/2  generating 8 rows", "step 1/2  scoring", "step 1/2  computing rewards"]
    expected += ["step 1/2  training", f"step 1/2  {clock}", EVALUATION]
    expected += [rf"step 2/2  reward 0  length \S+  {clock}"]
    expected += [EVALUATION.replace("step 1", "step 2")]
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    assert torch.isfinite(weights(trainer.model)).all()


def test_a_slow_step_says_what_it_does(capsys, monkeypatch):
    plain = PlainProgressCallback()
    state = TrainerState(max_steps=9, global_step=4)
    plain.on_train_begin(None, state, TrainerControl())
    state.global_step = 5
    begin("generation", 8)
    monkeypatch.setattr("trl.trainer.display.QUIET", -1.0)
    finish(2)
    plain.close()
    finish(1)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["step 6/9  generating 2/8"]


@pytest.mark.parametrize(
    ("in_terminal", "changes", "expected"),
    [
        (True, {}, RichProgressCallback),
        (False, {}, PlainProgressCallback),
        (False, {"disable_tqdm": True}, PrinterCallback),
    ],
)
def test_every_trainer_has_one_display(tmp_path, monkeypatch, in_terminal, changes, expected):
    monkeypatch.setattr("sys.stdout.isatty", lambda: in_terminal)
    trainer = make_trainer(tmp_path, **{"disable_tqdm": False} | changes)
    shows = {RichProgressCallback, PlainProgressCallback, PrinterCallback, ProgressCallback}
    assert [type(x) for x in trainer.callback_handler.callbacks if type(x) in shows] == [expected]
