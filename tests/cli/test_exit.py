"""How training commands end, what they say then, and what becomes of real processes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from forks import DEADLINE, Program
from online_runs import make_trainer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import TrainerCallback
from workspace import environment, run_python, write_inputs

from trl.cli import exit, launch
from trl.cli.exit import (
    INTERRUPTED,
    as_command_line,
    check_output_dir,
    describe,
    one_line_errors,
    print_success,
)
from trl.scripts import rloo
from trl.trainer.base.run_lock import LOCK, Owner
from trl.trainer.progress_callbacks import RichProgressCallback

PARSER = rloo.make_parser()


class Stop(TrainerCallback):
    """Raises when a step has ended and its checkpoint is written."""

    def __init__(self, error, step):
        self.error, self.step = error, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise self.error


@pytest.fixture(autouse=True)
def handler():
    """Ctrl-C ends the tests as before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def train(folder, error, step, **changes):
    bar = RichProgressCallback()
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1} | changes
    trainer = make_trainer(folder, callbacks=[bar, Stop(error, step)], **options)
    try:
        with one_line_errors(PARSER, trainer):
            trainer.train()
    finally:
        assert bar._drawing is None
    return trainer


def test_a_process_that_is_not_the_main_one_names_itself(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("trl.cli.exit.MAIN_RANK_FIRST", 0.0)
    with pytest.raises(SystemExit) as end, one_line_errors(PARSER):
        raise ValueError("the file is empty")
    assert end.value.code == 2
    assert capsys.readouterr().err == "trl rloo: error: the file is empty (process 3)\n"


def test_an_interrupted_run_says_how_to_go_on(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train(tmp_path, KeyboardInterrupt(), 2)
    assert end.value.code == INTERRUPTED == 130
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "interrupted" in x]
    assert line == (
        f"trl rloo: interrupted after 2 of 3 steps. The newest checkpoint is "
        f"{tmp_path / 'checkpoint-2'}; to continue from there, repeat the command with "
        "--resume_from_checkpoint true."
    )


def test_without_a_checkpoint_and_without_a_trainer(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(tmp_path, KeyboardInterrupt(), 0, save_strategy="no")
    with pytest.raises(SystemExit), one_line_errors(PARSER):
        raise KeyboardInterrupt
    first, second = [x for x in capsys.readouterr().err.splitlines() if "interrupted" in x]
    assert first.endswith(f"after 0 of 3 steps. There is no checkpoint in {tmp_path}.")
    assert second == "trl rloo: interrupted before training began."


def test_an_error_is_one_line_and_its_trace_is_kept(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train(tmp_path, ZeroDivisionError("beta=0.1 is\nno good"), 1)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "trl rloo: error: ZeroDivisionError: --beta 0.1 is no good This was after 1 of 3 steps. "
        f"The newest checkpoint is {tmp_path / 'checkpoint-1'}; to continue from there, repeat the "
        f"command with --resume_from_checkpoint true. The trace is in {tmp_path / 'error.txt'}."
    )
    trace = (tmp_path / "error.txt").read_text()
    assert trace.startswith("Traceback") and "on_step_begin" in trace


def test_a_trace_that_utf8_cannot_hold_is_kept(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(tmp_path, ValueError("bad \ud83d text"), 0)
    assert "error: bad \ufffd text" in capsys.readouterr().err
    assert "ValueError: bad \ufffd text" in (tmp_path / "error.txt").read_text(encoding="utf-8")


def test_debugging_shows_the_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError, match="x"):
        train(tmp_path, ZeroDivisionError("x"), 0)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\n b"), "a b"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(), "RuntimeError"),
        (
            ValueError("x differs:\n  - a: 1\n  - b:  2\nSet\n c."),
            "x differs:\n  - a: 1\n  - b: 2\nSet c.",
        ),
        (ValueError("- a\nb"), "- a b"),
    ],
)
def test_an_error_in_one_line(error, text):
    assert describe(error) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("num_generations=3 must divide", "--num_generations 3 must divide"),
        ("report_to='wandb' needs it.", "--report_to 'wandb' needs it."),
        ("Set use_cpu=True.", "Set --use_cpu true."),
        ("beta=0.5, top_k=None; x=1.", "--beta 0.5, --top_k none; x=1."),
        ("use reward_clip_range=(-10, 10).", "use --reward_clip_range -10 10."),
        (
            "generation_kwargs={'do_sample': False})",
            "--generation_kwargs '{\"do_sample\": false}')",
        ),
        ("--beta=0.1 and my_beta=3 and beta", "--beta=0.1 and my_beta=3 and beta"),
    ],
)
def test_options_are_spelled_as_on_the_command_line(text, shown):
    assert as_command_line(text, PARSER.names) == shown


def test_settings_that_changed_since_a_checkpoint_have_a_line_each(tmp_path, capsys):
    make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    trainer = make_trainer(tmp_path, temperature=0.5, seed=7, learning_rate=0.25)
    capsys.readouterr()
    with pytest.raises(SystemExit), one_line_errors(rloo.make_parser()):
        trainer.find_checkpoint(True)
    folder = tmp_path / "checkpoint-1"
    first, *changes, last = capsys.readouterr().err.splitlines()
    assert first.endswith(f"error: {folder} was written by a run with other settings:")
    assert changes == [
        "  - learning_rate: 0.1 in the checkpoint, 0.25 now",
        "  - seed: 42 in the checkpoint, 7 now",
        "  - temperature: 1.0 in the checkpoint, 0.5 now",
    ]
    assert last == "Restore them, or accept the changes with --resume_with_changes true."


def test_success_says_where_the_model_is(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    print_success(trainer)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"1 of 1 steps done; the model is in {tmp_path}."


def test_output_folders(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    check_output_dir(str(tmp_path))
    check_output_dir(str(tmp_path / "new" / "folder"))
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]
    for name, place in (("file", "file"), ("file/below", "file"), ("dangling", "dangling")):
        with pytest.raises(ValueError) as error:
            check_output_dir(str(tmp_path / name))
        start = f"--output_dir {tmp_path / name}: nothing can be written in {tmp_path / place}: "
        assert str(error.value).startswith(start)


def test_a_folder_that_nobody_can_write_in():
    with pytest.raises(ValueError, match="--output_dir /proc/x: nothing can be written in /proc: "):
        check_output_dir("/proc/x")


def test_ctrl_c_in_a_run_without_a_terminal(tmp_path):
    """Progress comes line by line; the group of processes is interrupted as a terminal does it."""
    write_inputs(tmp_path)
    options = {"model_name_or_path": "tiny-model", "dataset_name": "prompts.jsonl"}
    options |= {"reward_funcs": "rewards.exact", "max_steps": 100_000, "save_strategy": "no"}
    options |= {"max_completion_length": 4, "num_generations": 4, "output_dir": "out"}
    options |= {"use_cpu": "true", "bf16": "false", "report_to": "none"}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    run = Program(["-m", "trl", "rloo", *words], tmp_path, environment(tmp_path))
    deadline = time.monotonic() + DEADLINE
    while "\nstep 1/100000  " not in run.output and time.monotonic() < deadline:
        assert run.poll() is None, run.errors
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait().status == INTERRUPTED
    assert "Traceback" not in run.errors
    assert "of 100000 steps. There is no checkpoint in out." in run.errors.splitlines()[-1]


SLOW = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests are in a background
try:
    print("here", flush=True)
    time.sleep(120)
except KeyboardInterrupt:
    print("told")
"""
DEAF = SLOW.replace("default_int_handler", "SIG_IGN")


@pytest.fixture
def started():
    found = []

    def start(code):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        found.append(process)
        assert process.stdout.readline() == b"here\n"
        return process

    yield start
    for process in found:
        process.kill()
        process.communicate()


def interrupt(start, code):
    """Interrupt this process alone, after it has started one that runs `code`."""
    found = []

    def work():
        found.append(start(code))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exit.stopping_on_interrupt()(work)()
    return found[0]


def test_one_that_was_not_told_is_told(started, monkeypatch):
    monkeypatch.setattr(exit, "TERMINAL_SECONDS", 0.01)
    assert interrupt(started, SLOW).communicate(timeout=60)[0] == b"told\n"


def test_one_that_goes_on_is_killed(started, monkeypatch):
    monkeypatch.setattr(exit, "TERMINAL_SECONDS", 0.01)
    monkeypatch.setattr(exit, "GRACE_SECONDS", 0.01)
    process = interrupt(started, DEAF)
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout.read() == b""


def test_one_that_ends_by_itself_and_others_are_left_alone(started):
    other = started(SLOW)
    process = interrupt(started, "print('here', flush=True); import time; time.sleep(0.2)")
    assert process.wait(60) == 0
    assert other.poll() is None


@pytest.mark.parametrize("status", [2, 3, 130, -9, -15])
@pytest.mark.parametrize("workers", ["one", "several"])
def test_the_status_of_workers_is_passed_on(monkeypatch, capsys, workers, status):
    one = subprocess.CalledProcessError(status, "worker")
    several = ChildFailedError("worker", {1: ProcessFailure(1, 1, status, "absent")})

    def fail(_):
        raise one if workers == "one" else several

    monkeypatch.setattr(launch, "launch_command", fail)
    with pytest.raises(SystemExit) as end:
        launch.launch("rloo", PARSER, ["--output_dir", "out"])
    rank = 0 if workers == "one" else 1
    code, words = {
        2: (2, ""),
        130: (130, ""),
        3: (3, f"trl rloo: error: process {rank} ended with status 3.\n"),
        -9: (
            128 + 9,
            f"trl rloo: error: process {rank} was ended by SIGKILL; the system does that when main "
            "memory runs out.\n",
        ),
        -15: (128 + 15, f"trl rloo: error: process {rank} was ended by SIGTERM.\n"),
    }[status]
    assert (end.value.code, capsys.readouterr().err) == (code, words)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, ""),
        (SignalException("x", signal.SIGINT), 130, ""),
        (SignalException("x", signal.SIGTERM), 143, "trl rloo: error: process 0 was ended by SIG"),
    ],
)
def test_a_signal_to_the_launcher(monkeypatch, capsys, error, code, words):
    def fail(_):
        raise error

    monkeypatch.setattr(launch, "launch_command", fail)
    with pytest.raises(SystemExit) as end:
        launch.launch("rloo", PARSER, ["--output_dir", "out"])
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(words)


def test_a_folder_in_which_another_run_trains(tmp_path):
    process = psutil.Process(os.getppid())
    owner = dataclasses.replace(
        Owner.current(), process_id=process.pid, process_start=process.create_time()
    )
    (tmp_path / LOCK).write_text(json.dumps(dataclasses.asdict(owner)))
    with pytest.raises(OSError, match=f"output_dir='{tmp_path}' is in use: process {process.pid} "):
        check_output_dir(str(tmp_path))


LAUNCH = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]
LAUNCH += ["--dynamo_backend", "no"]
WARNS = "from trl.cli.exit import warn_of_missing_ranks\nwarn_of_missing_ranks()\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have a process each")
@pytest.mark.parametrize(
    ("words", "says"),
    [(["--num_processes", "2"], True), (["--num_processes", "1"], False)],
)
def test_one_process_instead_of_several_is_told(tmp_path, words, says):
    (tmp_path / "warns.py").write_text(WARNS)
    done = run_python([*LAUNCH, *words, "warns.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("has started one process, because there are no GPUs" in done.stderr) is says
