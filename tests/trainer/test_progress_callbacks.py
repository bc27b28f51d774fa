import contextlib
import os
import pty
import re
import threading

import pytest
import sft_runs
import torch
from online_runs import dataset, make_trainer, weights
from rich.console import Console
from transformers import TrainerControl, TrainerState
from transformers.utils import logging

from trl.memory.progress import begin, finish
from trl.number_format import format_metric
from trl.trainer.progress_callbacks import PlainProgressCallback, RichProgressCallback
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


EVALUATION = r"step 1/2  evaluation of small:  loss \S+  reward 0\.00  length \d+(\.\d+)?"
LOGGED = r"loss \S+  lr 0\.100  grad_norm \S+  reward 0\.00  length \S+"
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
    assert re.fullmatch(rf"step 2/2  ━+  ETA 0:00:00  {CLOCK} *", last)
    assert re.search(f"step 2/2  {LOGGED} *\n", shown)
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
    parts = ["step 3/500", "ETA 5:31:", "generating 12/64", "elapsed"]
    shown = [part for part in parts if part in line]
    assert shown == parts[: {20: 1, 40: 2, 80: 4, 120: 4}[width]], line
    assert "reward" not in line, "it stands above"


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
    expected = ["step 1/2  generating 8 rows", "step 1/2  computing rewards", "step 1/2  scoring"]
    expected += ["step 1/2  training", f"step 1/2  {clock}", EVALUATION]
    expected += [rf"step 2/2  {LOGGED}  {clock}"]
    expected += [EVALUATION.replace("step 1", "step 2")]
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    assert torch.isfinite(weights(trainer.model)).all()


def screen_of(output):
    """What stands on a terminal after some output, line by line; rich uses few escape codes."""
    lines, row, column = [""], 0, 0
    for code, moves, text in re.findall(r"\x1b\[\??([0-9;]*)([A-Za-z])|([^\x1b])", output):
        if moves == "A":
            row -= int(code or 1)
        elif moves == "K":
            lines[row] = ""
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


@contextlib.contextmanager
def pseudo_terminal(monkeypatch):
    """A terminal of 120 columns in place of standard output; gives what was written to it."""
    master, slave = pty.openpty()
    written = []

    def read():
        with contextlib.suppress(OSError):  # when nobody can write any more
            while block := os.read(master, 4096):
                written.append(block.decode())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with monkeypatch.context() as change, os.fdopen(slave, "w", encoding="utf-8") as file:
        change.setenv("COLUMNS", "120")
        # Where another test imported rich, it may have seen another environment.
        change.setattr("rich.console.Console._environ", os.environ)
        change.setenv("TERM", "xterm")
        change.setattr("sys.stdout", file)
        yield written
    reader.join(20)
    os.close(master)


def test_logged_values_stay_above_one_live_line(tmp_path, monkeypatch):
    changes = {"max_steps": 3, "beta": 0.1, "eval_strategy": "steps", "eval_steps": 2}
    changes |= {"eval_dataset": dataset(["xy"]), "per_device_eval_batch_size": 4}
    with pseudo_terminal(monkeypatch) as written:
        trainer = make_trainer(tmp_path, disable_tqdm=False, **changes)
        assert any(type(x) is RichProgressCallback for x in trainer.callback_handler.callbacks)
        trainer.train()
    output = "".join(written)
    shown = [line for line in screen_of(output) if line.startswith("step ")]
    number = r"-?\d+(\.\d+)?(e[-+]\d+)?"
    names = ("loss", "lr", "grad_norm", "reward", "kl", "length")
    logged = "  ".join(f"{name} {number}" for name in names)
    evaluated = "  ".join(f"{name} {number}" for name in names if name not in ("lr", "grad_norm"))
    expected = [f"step 1/3  {logged}", f"step 2/3  {logged}"]
    expected += [f"step 2/3  evaluation:  {evaluated}", f"step 3/3  {logged}"]
    expected += [f"step 3/3  evaluation:  {evaluated}"]
    expected += [rf"step 3/3  ━+  ETA 0:00:00  {CLOCK}"]
    assert len(shown) == len(expected), output
    for line, pattern in zip(shown, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert "\x1b" in output, "it is a terminal"
    for log, line in zip(trainer.state.log_history[:1], shown, strict=False):
        assert f"kl {format_metric(log['kl'])}  " in line
        assert f"reward {format_metric(log['reward'])}  " in line


def test_accuracy_is_shown_where_there_is_no_reward(tmp_path, capsys):
    sft_runs.make_trainer(tmp_path, callbacks=[PlainProgressCallback()]).train()
    logged = r"loss \S+  lr \S+  grad_norm \S+  accuracy 0\.\d+"
    assert re.search(rf"\nstep 1/1  {logged}  {CLOCK}, \S+ left\n", capsys.readouterr().out)


def test_a_slow_step_says_what_it_does(capsys, monkeypatch):
    plain = PlainProgressCallback()
    state = TrainerState(max_steps=9, global_step=4)
    plain.on_train_begin(None, state, TrainerControl())
    state.global_step = 5
    begin("generation", 8)
    monkeypatch.setattr("trl.trainer.progress_callbacks.QUIET", -1.0)
    finish(2)
    plain.close()
    finish(1)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["step 6/9  generating 2/8"]
