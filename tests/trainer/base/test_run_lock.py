"""One run at a time writes into an output folder; locks of dead runs are taken over."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from distributed.engines import call
from forks import Program
from online_runs import make_trainer, token_sum
from workspace import environment

from trl.distributed import RankError, Ranks
from trl.online.rewards import RewardError
from trl.trainer.base import run_lock
from trl.trainer.base.run_lock import LOCK, FolderInUseError, Owner, RunLock, check_free

SCRIPT = Path(__file__).with_name("lock_run.py")


def lock(folder):
    return RunLock(SimpleNamespace(output_dir=str(folder)), Ranks())


def write_lock(folder, seconds_ago=0.0, **changes):
    """A lock of this machine's process `changes["process_id"]`, touched some time ago."""
    process = psutil.Process(changes.get("process_id", os.getppid()))
    values = {"process_id": process.pid, "process_start": process.create_time()} | changes
    path = Path(folder, LOCK)
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(Owner.current(), **values))))
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


@pytest.fixture
def impatient(monkeypatch):
    """Short times, for runs that are watched from elsewhere."""
    monkeypatch.setattr(run_lock, "REFRESH", 0.05)
    monkeypatch.setattr(run_lock, "ABANDONED", 1.0)


def test_the_lock_is_there_while_it_is_held(tmp_path):
    folder = tmp_path / "new" / "out"
    held = lock(folder)
    with held, held:
        owner = run_lock.read_owner(folder / LOCK)
        assert (owner.host, owner.process_id) == (socket.gethostname(), os.getpid())
        assert abs(owner.since - time.time()) < 60
    assert os.listdir(folder) == []
    with held:
        assert os.listdir(folder) == [LOCK]
    assert os.listdir(folder) == []


def test_it_is_touched_while_it_is_held(tmp_path, impatient):
    with lock(tmp_path):
        path = tmp_path / LOCK
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 60
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert abs(path.stat().st_mtime - time.time()) < 60


def test_a_run_of_a_live_process_is_named(tmp_path):
    write_lock(tmp_path, since=0.0)
    pattern = (
        f"output_dir='{tmp_path}' is in use: process {os.getppid()} on {socket.gethostname()} has "
        r"been training there since (1970-01-01|1969-12-31) \d\d:\d\d:00 .*\. Choose another "
        "output_dir, or end that run first."
    )
    with pytest.raises(FolderInUseError) as caught, lock(tmp_path):
        pass
    assert re.fullmatch(pattern, str(caught.value))
    assert (tmp_path / LOCK).exists()
    with pytest.raises(FolderInUseError):
        check_free(tmp_path)


def test_locks_of_dead_processes_are_taken_over_at_once(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    path = write_lock(tmp_path, process_id=ended.pid, process_start=time.time())
    ended.terminate()
    deadline = time.monotonic() + 60
    while psutil.Process(ended.pid).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.01)
    with lock(tmp_path):  # it is a zombie, as nobody has asked for its status
        assert run_lock.read_owner(path) != ended.pid
    ended.wait()
    with lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_process_id_that_is_used_again_is_no_run(tmp_path):
    start = psutil.Process(os.getppid()).create_time()
    path = write_lock(tmp_path, process_start=start - 60)
    with lock(tmp_path):
        assert run_lock.read_owner(path).process_id == os.getpid()


def test_a_lock_that_this_process_left_is_its_own(tmp_path):
    """An interrupt may hit a notebook at any instant."""
    start = psutil.Process().create_time()
    write_lock(tmp_path, process_id=os.getpid(), process_start=start)
    with lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"pid_namespace": "pid:[1]"}], ids=lambda x: next(iter(x))
)
def test_runs_elsewhere_are_refused_while_they_touch_their_lock(tmp_path, impatient, changes):
    path = write_lock(tmp_path, **changes)
    ended = threading.Event()

    def touch():
        while not ended.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    host = changes.get("host", socket.gethostname())
    try:
        with pytest.raises(
            FolderInUseError, match=f"process {os.getppid()} on {host} has"
        ) as caught:
            check_free(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert str(caught.value).endswith(f"If it has ended, remove {path}.")
    assert os.listdir(tmp_path) == [LOCK]


def test_runs_elsewhere_that_stopped_touching_their_lock_are_dead(tmp_path, impatient):
    path = write_lock(tmp_path, host="elsewhere")
    start = time.monotonic()
    with lock(tmp_path):
        assert run_lock.read_owner(path).host == socket.gethostname()
    assert time.monotonic() - start > 0.5
    write_lock(tmp_path, seconds_ago=3600.0, host="elsewhere")
    with lock(tmp_path):
        assert run_lock.read_owner(path).host == socket.gethostname()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "x"}'])
def test_a_damaged_lock_counts_by_its_age(tmp_path, impatient, monkeypatch, text):
    monkeypatch.setattr(run_lock, "WRITING", 0.05)
    path = tmp_path / LOCK
    path.write_text(text)
    os.utime(path, (0, 0))
    with lock(tmp_path):
        assert run_lock.read_owner(path).process_id == os.getpid()


def test_a_lock_that_is_gone_is_told_and_another_run_s_is_left(tmp_path, impatient, monkeypatch):
    warnings = []
    monkeypatch.setattr(run_lock.logger, "warning", warnings.append)
    with lock(tmp_path):
        write_lock(tmp_path)
        deadline = time.monotonic() + 60
        while not warnings and time.monotonic() < deadline:
            time.sleep(0.01)
    assert warnings == [f"{tmp_path / LOCK} was removed or replaced while this run trains there."]
    assert run_lock.read_owner(tmp_path / LOCK).process_id == os.getppid()


def fail(completion_ids, **kwargs):
    raise ValueError("planned")


def test_training_holds_it_and_lets_go(tmp_path):
    seen = []

    def reward(completion_ids, **kwargs):
        seen.append((tmp_path / LOCK).exists())
        return token_sum(completion_ids)

    trainer = make_trainer(
        tmp_path, reward=reward, max_steps=1, reward_dry_run=False, eval_dataset=None
    )
    trainer.train()
    trainer.train()
    assert seen == [True, True]
    with pytest.raises(RewardError, match="planned"):
        make_trainer(tmp_path, reward=fail, max_steps=1, reward_dry_run=False).train()
    assert not (tmp_path / LOCK).exists()


def test_evaluation_and_a_search_for_checkpoints(tmp_path):
    """An evaluation alone needs no lock; cleaning up after a killed run does."""
    trainer = make_trainer(tmp_path, max_steps=1, per_device_eval_batch_size=4)
    write_lock(tmp_path)
    assert "eval_reward" in trainer.evaluate(trainer.train_dataset)
    (tmp_path / "unfinished").mkdir()
    for begins in (trainer.find_checkpoint, trainer.train):
        with pytest.raises(FolderInUseError):
            begins()
    assert (tmp_path / "unfinished").exists()
    assert not (tmp_path / "run.json").exists()


# --- Several processes ---


def begin(work, folder, name):
    return Program([SCRIPT, work, folder, name], folder.parent, environment(folder.parent))


def wait_for(path):
    deadline = time.monotonic() + 300
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists()


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_one_is_not_in_the_way(tmp_path):
    folder = tmp_path / "out"
    first = begin("train", folder, "first")
    wait_for(tmp_path / "first.won")
    second = begin("train", folder, "second").wait()
    assert second.status == 1
    place = f"process {first.pid} on {socket.gethostname()} has been training there since 20"
    assert f"FolderInUseError: output_dir='{folder}' is in use: {place}" in second.errors
    assert not (tmp_path / "second.won").exists()
    first.kill()
    assert (folder / LOCK).exists()
    (tmp_path / "third").touch()
    third = begin("train", folder, "third").wait()
    assert third.status == 0, third.errors
    assert LOCK not in third.errors
    assert not (folder / LOCK).exists()


@pytest.mark.slow
def test_of_several_that_begin_together_one_wins(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    write_lock(folder, process_start=0.0)  # which is stale
    names = [str(i) for i in range(6)]
    racing = [begin("race", folder, name) for name in names]
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 300
    while sum(run.poll() is None for run in racing) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    won = [name for name in names if (tmp_path / f"{name}.won").exists()]
    assert [run.poll() for run in racing].count(1) == 5, [run.errors for run in racing]
    assert len(won) == 1
    (tmp_path / "stop").touch()
    assert racing[int(won[0])].wait().status == 0
    assert os.listdir(folder) == []


def train_on_two_ranks(folder):
    trainer = make_trainer(folder, max_steps=1, per_device_train_batch_size=4)
    try:
        trainer.train()
    except (FolderInUseError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return f"trained {trainer.state.global_step}"


@pytest.mark.distributed
def test_all_ranks_stop_together(tmp_path):
    write_lock(tmp_path)
    first, second = call(train_on_two_ranks, tmp_path)
    refusal = f"FolderInUseError: output_dir='{tmp_path}' is in use: process {os.getppid()} on"
    assert first.startswith(refusal)
    assert second.startswith(f"RankError: Rank 0 failed in locking output_dir: {refusal}")
    (tmp_path / LOCK).unlink()
    assert call(train_on_two_ranks, tmp_path) == ["trained 1", "trained 1"]
    assert not (tmp_path / LOCK).exists()
