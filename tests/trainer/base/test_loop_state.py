"""A resumed run is where the uninterrupted one was: data, rounds, random numbers, metrics."""

import hashlib
import random

import numpy as np
import pytest
import torch
from online_runs import dataset, make_trainer, weights
from transformers import TrainerCallback

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
            self.trainer.place.epoch,
            self.trainer.place.micro_steps,
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
