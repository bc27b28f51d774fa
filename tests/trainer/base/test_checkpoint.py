"""Folders that are complete or not there; a resumed run is where the uninterrupted one was."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from online_runs import dataset, make_trainer, weights
from transformers import TrainerCallback

from trl.trainer.base import checkpoint
from trl.trainer.base.checkpoint import (
    MANIFEST,
    UNFINISHED,
    checkpoints_in,
    clean_up,
    facts_of,
    find_fault,
    publish,
    rotate,
    seal,
)

FILES = {"model.safetensors": b"weights", "global_step1/rank0.pt": b"shard", "README.md": b"card"}


def write(folder, **more):
    for name, content in ({"trainer_state.json": b"{}"} | FILES | more).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def sealed(folder, **more):
    write(folder, **more)
    seal(folder, {"step": 1})
    return folder


def names(folder):
    return sorted(path.name for path in checkpoints_in(folder))


def test_an_intact_checkpoint_has_no_fault(tmp_path):
    folder = sealed(tmp_path / "checkpoint-1")
    assert find_fault(folder) is None
    assert facts_of(folder) == {"step": 1}
    (folder / "README.md").write_text("edited")
    (folder / "notes.txt").write_text("added")
    assert find_fault(folder) is None


@pytest.mark.parametrize("name", ["model.safetensors", "global_step1/rank0.pt"])
def test_every_kind_of_damage_is_found(tmp_path, name):
    folder = sealed(tmp_path / "checkpoint-1")
    path, whole = folder / name, FILES[name]
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert find_fault(folder) == f"{path.name} is not what was written: its checksum differs"
    path.write_bytes(whole[:-1])
    assert find_fault(folder) == f"{path.name} has {len(whole) - 1} bytes, not {len(whole)}"
    path.unlink()
    assert find_fault(folder) == f"{path.name} is missing"


def test_damage_of_the_manifest_itself_is_found(tmp_path):
    folder = sealed(tmp_path / "checkpoint-1")
    text = (folder / MANIFEST).read_text()
    for damaged in (text[:-5], text.replace('"step": 1', '"step": 2'), "", "[]", "{}"):
        (folder / MANIFEST).write_text(damaged)
        assert find_fault(folder) == f"{MANIFEST} is damaged"


def test_a_checkpoint_of_another_program_has_no_checksums(tmp_path):
    folder = write(tmp_path / "checkpoint-1")
    assert find_fault(folder) is None and facts_of(folder) is None
    (folder / "trl_state_0.pt").write_bytes(b"ours")
    assert find_fault(folder) == f"{MANIFEST} is missing, though trl_state_0.pt is there"
    (folder / "trainer_state.json").unlink()
    assert find_fault(folder) == "trainer_state.json is missing"


def test_checkpoints_are_found_by_their_step(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-10", "checkpoint-9"]


def test_a_new_checkpoint_takes_the_place_of_an_old_one(tmp_path):
    final = sealed(tmp_path / "checkpoint-1")
    staged = sealed(tmp_path / UNFINISHED / "checkpoint-1", **{"model.safetensors": b"new"})
    publish(staged, final)
    assert (final / "model.safetensors").read_bytes() == b"new"
    assert find_fault(final) is None
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1"]


def test_what_a_killed_run_left_is_finished_or_removed(tmp_path):
    sealed(tmp_path / "checkpoint-1")
    sealed(tmp_path / UNFINISHED / "checkpoint-2")  # killed before it was named
    write(tmp_path / UNFINISHED / "checkpoint-3")  # killed before it was sealed
    damaged = sealed(tmp_path / UNFINISHED / "checkpoint-4")
    (damaged / "model.safetensors").unlink()
    sealed(tmp_path / UNFINISHED / "replaced-checkpoint-1")  # killed while it was removed
    clean_up(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2"]
    clean_up(tmp_path / "absent")


@pytest.mark.parametrize(
    ("limit", "kept", "left"),
    [
        (None, [4], [1, 2, 3, 4]),
        (0, [4], [1, 2, 3, 4]),
        (2, [4], [3, 4]),
        (1, [4], [4]),
        (1, [4, 2], [2, 4]),
        (3, [4, 1], [1, 3, 4]),
        (9, [4], [1, 2, 3, 4]),
        (1, [2], [2]),  # resumed from an older one: the newest number is not the newest file
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, limit, kept, left):
    for step in (1, 2, 3, 4):
        os.utime(sealed(tmp_path / f"checkpoint-{step}"), (step, step))
    rotate(tmp_path, limit, [tmp_path / f"checkpoint-{step}" for step in kept])
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]
    assert not (tmp_path / UNFINISHED).exists()


# --- Real trainers ---


@contextmanager
def files_of_at_most(size):
    """Writing more than `size` bytes to a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_is_full_leaves_the_checkpoint_before_intact(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = make_trainer(tmp_path, **settings, optim="adamw_torch")
    trainer.train()
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoint-1").rglob("*")]
    trainer.state.global_step = 2
    failed = 0
    for size in sorted({size - 1 for size in sizes if size > 2000}):
        with files_of_at_most(size), pytest.raises(OSError, match="checkpoint-2 could not be") as e:
            trainer._save_checkpoint(trainer.model, None)
        assert "untouched: checkpoint-1." in str(e.value)
        assert names(tmp_path) == ["checkpoint-1"]
        assert find_fault(tmp_path / "checkpoint-1") is None
        failed += 1
    assert failed > 5, "each large file in turn"
    trainer._save_checkpoint(trainer.model, None)
    assert names(tmp_path) == ["checkpoint-2"]


def test_the_last_good_one_goes_after_the_new_one_is_complete(tmp_path, monkeypatch):
    seen, remove = [], shutil.rmtree

    def look(folder, **options):
        seen.append([name for name in names(tmp_path) if find_fault(tmp_path / name) is None])
        remove(folder, **options)

    trainer = make_trainer(
        tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3
    )
    monkeypatch.setattr(shutil, "rmtree", look)
    trainer.train()
    assert ["checkpoint-2"] in seen and ["checkpoint-3"] in seen
    assert [] not in seen[seen.index(["checkpoint-2"]) :]
    assert names(tmp_path) == ["checkpoint-3"]


def test_the_best_checkpoint_is_known_by_its_name(tmp_path):
    trainer = make_trainer(
        tmp_path,
        eval_dataset=dataset(["xy"]),
        per_device_eval_batch_size=4,
        **{f"{kind}_strategy": "steps" for kind in ("eval", "save")},
        **{f"{kind}_steps": 1 for kind in ("eval", "save")},
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        load_best_model_at_end=True,
        save_total_limit=1,
        max_steps=3,
    )
    trainer.train()
    # Completions are scripted, so the reward of the evaluation never rises above the first.
    best = tmp_path / "checkpoint-1"
    assert trainer.state.best_model_checkpoint == str(best)
    assert json.loads((best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(
        best
    )
    assert find_fault(best) is None
    loaded = torch.load(best / "optimizer.pt", weights_only=True)
    assert loaded["param_groups"]


def test_every_process_and_the_layout_of_transformers_are_there(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=1).train()
    found = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert found >= {
        *("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
        *("trainer_state.json", "training_args.bin", "tokenizer.json", "README.md"),
        *("trl_state_0.pt", MANIFEST),
    }


def bytes_read():
    with open("/proc/self/io") as file:
        return int(next(line.split()[1] for line in file if line.startswith("rchar")))


@pytest.mark.parametrize(("whole", "share"), [(True, 1.0), (False, 0.25)])
def test_checksums_of_large_files_are_sampled_unless_asked_for(tmp_path, whole, share):
    folder, size = write(tmp_path / "checkpoint-1"), 2**27
    with (folder / "large.bin").open("wb") as file:
        file.truncate(size)
    before = bytes_read()
    seal(folder, {}, whole)
    read = bytes_read() - before
    assert read <= share * size + 2**20 and (not whole or read >= size)
    assert find_fault(folder) is None
    for place in (0, size - 1):  # both ends are always looked at
        with (folder / "large.bin").open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert "its checksum differs" in find_fault(folder)
        with (folder / "large.bin").open("r+b") as file:
            file.seek(place)
            file.write(b"\0")


# --- Resumed runs: data, rounds, random numbers, metrics ---

PROMPTS = ["a0", "b1", "c2", "d3", "e4"]  # the last fills no round


def noisy(completion_ids, **kwargs):
    """A reward that draws from every generator."""
    return [
        (sum(ids) % 13) / 3 + random.random() + np.random.rand() + float(torch.rand(()))
        for ids in completion_ids
    ]


class Watch(TrainerCallback):
    """Notes where a run is before each update."""

    def __init__(self):
        self.trainer, self.places, self.generated = None, {}, []

    def attach(self, trainer):
        self.trainer, generate = trainer, trainer.backend.generate
        trainer.add_callback(self)

        def counted(*args, **kwargs):
            self.generated.append(trainer.state.global_step)
            return generate(*args, **kwargs)

        trainer.backend.generate = counted
        return self

    def on_step_begin(self, args, state, control, **kwargs):
        drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
        self.places[state.global_step] = (
            self.trainer.data_position.epoch,
            self.trainer.data_position.micro_steps,
            tuple(self.trainer.lr_scheduler.get_last_lr()),
            state.num_input_tokens_seen,
            *(hashlib.sha256(repr(x).encode()).hexdigest() for x in drawn[:2]),
            hashlib.sha256(drawn[2].numpy().tobytes()).hexdigest(),
        )


def watched(folder, stream=False, **changes):
    """Rounds of 4 micro-batches, 2 passes: 4 updates a round, 8 an epoch, logs every other."""
    data = dataset(PROMPTS)
    settings = {
        "reward": noisy,
        "data": data.to_iterable_dataset() if stream else data,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "shuffle_dataset": True,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
        "learning_rate": 0.01,
        "max_steps": 11,
        "logging_steps": 2,
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    }
    trainer = make_trainer(folder, **(settings | changes))
    return trainer, Watch().attach(trainer)


def logs_of(trainer):
    return [
        {name: x for name, x in entry.items() if "time" not in name and "per_second" not in name}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["dataset", "stream"])
def test_nothing_consumed_is_generated_again(tmp_path, stream):
    """From within a round, its end, the end of an epoch, and within the next epoch."""
    whole, seen = watched(tmp_path / "whole", stream, save_strategy="steps", save_steps=1)
    whole.train()
    assert seen.generated == [0, 4, 8]
    for step in (1, 4, 8, 9):
        resumed, found = watched(tmp_path / f"from-{step}", stream)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert found.generated == [at for at in seen.generated if at >= step], step
        assert found.places == {k: v for k, v in seen.places.items() if k >= step}, step
        assert torch.equal(weights(resumed.model), weights(whole.model)), step
        references = [weights(t.reference.model) for t in (resumed, whole)]
        assert torch.equal(*references), step
        assert logs_of(resumed) == logs_of(whole), step


def test_a_stream_that_ends_within_an_update(tmp_path):
    """Eight micro-steps an epoch and three an update: the last two train nothing."""
    settings = {"gradient_accumulation_steps": 3, "num_iterations": 1, "max_steps": 5}
    whole, seen = watched(tmp_path, True, **settings, save_strategy="steps", save_steps=1)
    whole.train()
    assert [place[:2] for place in seen.places.values()] == [(0, 0), (0, 3), (1, 0), (1, 3), (2, 0)]
    for step in (2, 3):
        resumed, found = watched(tmp_path / str(step), True, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert found.places == {k: v for k, v in seen.places.items() if k >= step}
        assert torch.equal(weights(resumed.model), weights(whole.model))


def test_epochs_of_a_stream_have_their_own_order(tmp_path):
    trainer, _ = watched(tmp_path, True, max_steps=24)
    orders, collect = [], trainer.collect

    def noted(rows, mode):
        orders.append([row["prompt"] for row in rows[::4]])
        return collect(rows, mode)

    trainer.collect = noted
    trainer.train()
    epochs = [orders[i] + orders[i + 1] for i in (0, 2, 4)]
    assert len({tuple(order) for order in epochs}) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["dataset", "stream"])
def test_saved_at_the_end_of_an_epoch(tmp_path, stream):
    whole, seen = watched(tmp_path, stream, save_strategy="epoch", num_train_epochs=2)
    whole.train()
    resumed, found = watched(tmp_path / "resumed", stream)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert found.places == {k: v for k, v in seen.places.items() if k >= 8}
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_a_finished_run_is_not_continued(tmp_path):
    whole, _ = watched(tmp_path, save_strategy="steps", save_steps=11)
    whole.train()
    resumed, found = watched(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert found.places == {} and resumed.state.global_step == 11
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_other_batches_begin_a_round_anew(tmp_path):
    trainer, _ = watched(tmp_path, save_strategy="steps", save_steps=5, max_steps=5)
    trainer.train()
    resumed, found = watched(tmp_path, num_iterations=1, max_steps=8, resume_with_changes=True)
    resumed.train(resume_from_checkpoint=True)
    assert found.generated == [5, 6] and resumed.state.global_step == 8


def test_data_that_is_not_skipped_is_generated(tmp_path):
    settings = {"ignore_data_skip": True, "max_steps": 7}
    trainer, _ = watched(tmp_path, **settings, save_strategy="steps", save_steps=5)
    trainer.train()
    resumed, found = watched(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert found.generated == [5] and resumed.state.global_step == 7


def test_evaluating_changes_nothing(tmp_path):
    plain, seen = watched(tmp_path / "plain", max_steps=4)
    plain.train()
    evaluated, found = watched(
        tmp_path / "evaluated",
        max_steps=4,
        eval_dataset=dataset(["xy"]),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
    )
    evaluated.train()
    assert found.places == seen.places
    assert torch.equal(weights(evaluated.model), weights(plain.model))


def test_a_second_training_begins_with_a_round_of_its_own(tmp_path):
    trainer, seen = watched(tmp_path, max_steps=2)
    trainer.train()
    trainer.train()
    assert seen.generated == [0, 0]


def test_the_loss_that_is_returned_is_that_of_the_call(tmp_path):
    settings = {"logging_steps": 4, "max_steps": 4, "num_iterations": 1, "steps_per_generation": 2}
    whole, _ = watched(tmp_path, **settings, save_strategy="steps", save_steps=3)
    losses = []
    step = whole.training_step
    whole.training_step = lambda *a, **k: losses.append(step(*a, **k)) or losses[-1]
    whole.train()
    resumed, _ = watched(tmp_path, **settings)
    result = resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert result.training_loss == pytest.approx(float(sum(losses[6:])), abs=1e-6)
    logged = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert logged == pytest.approx([float(sum(losses)) / 4], abs=1e-6)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    """Its rounds and micro-batches may be stored in another way."""
    with monkeypatch.context() as earlier:
        earlier.setattr(checkpoint, "STATE_FORMAT", 1)
        make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    resumed = make_trainer(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"trl_state_0.pt was written by another version of trl"):
        resumed.train(resume_from_checkpoint=True)
