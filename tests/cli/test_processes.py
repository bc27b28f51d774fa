"""The ends of the workers of a command, those that are interrupted with real processes."""

import signal
import subprocess
import sys

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from workspace import run_python

from trl.cli import launch, processes
from trl.cli.commands import TRAINING

PARSER = TRAINING["rloo"].option_parser()

SLOW = """
import time
try:
    print("here", flush=True)
    time.sleep(120)
except KeyboardInterrupt:
    print("told")
"""
DEAF = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{SLOW}"


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
        processes.stopping_on_interrupt()(work)()
    return found[0]


def test_one_that_was_not_told_is_told(started, monkeypatch):
    monkeypatch.setattr(processes, "ALONE", 0.01)
    assert interrupt(started, SLOW).communicate(timeout=10)[0] == b"told\n"


def test_one_that_goes_on_is_killed(started, monkeypatch):
    monkeypatch.setattr(processes, "ALONE", 0.01)
    monkeypatch.setattr(processes, "GRACE", 0.01)
    process = interrupt(started, DEAF)
    assert process.wait(10) == -signal.SIGKILL
    assert process.stdout.read() == b""


def test_one_that_ends_by_itself_and_others_are_left_alone(started):
    other = started(SLOW)
    process = interrupt(started, "print('here', flush=True); import time; time.sleep(0.2)")
    assert process.wait(10) == 0
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


LAUNCH = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]
LAUNCH += ["--dynamo_backend", "no"]
WARNS = "from trl.cli.processes import warn_of_missing_ranks\nwarn_of_missing_ranks()\n"


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
