"""Runs that are resumed, run out of memory, or meet numbers that are not finite."""

import tracemalloc
from functools import partial

import dpo_runs
import kto_runs
import numpy as np
import pyarrow as pa
import pytest
import reward_runs
import torch
from datasets import Dataset, load_from_disk
from sft_runs import direction, logged, make_trainer, relative, texts, weights
from tiny import tiny_model

TIMED = ("time", "runtime", "per_second", "train_loss")


def outcome(trainer):
    """Weights and logs, without what depends on when a run was started."""
    logs = [
        {name: x for name, x in entry.items() if not any(word in name for word in TIMED)}
        for entry in trainer.state.log_history
    ]
    return weights(trainer.model), logs


KINDS = {
    "packing": (texts(40), {"packing": True, "max_length": 48}),
    "token budget": (texts(40), {"max_tokens_per_micro_batch": 50}),
    "tokenized while training": (texts(40), {"lazy_tokenization": True}),
    "stream": (texts(40), {"stream": True}),
    "shuffled stream, packing": (
        texts(40),
        {"stream": True, "packing": True, "shuffle_dataset": True, "max_length": 48},
    ),
    "workers": (texts(40), {"dataloader_num_workers": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_as_one_that_went_on(tmp_path, kind):
    """Bit for bit, from within an epoch and from within a log, with dropout and in a new order."""
    data, changes = KINDS[kind]
    changes = dict(changes)
    data = data.to_iterable_dataset() if changes.pop("stream", False) else data
    settings = {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 13,
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
    } | changes

    def run(folder, checkpoint=None):
        model = tiny_model(attention_dropout=0.1)
        trainer = make_trainer(folder, data, model=model, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return outcome(trainer)

    alone = run(tmp_path / "alone")
    for step in (5, 10):
        again = run(tmp_path / "again", str(tmp_path / "alone" / f"checkpoint-{step}"))
        assert torch.equal(again[0], alone[0]), step
        assert again[1] == alone[1]
    assert alone[1][-1]["epoch"] > 0


def test_each_epoch_has_another_order(tmp_path):
    trainer = make_trainer(
        tmp_path,
        texts(16),
        train_sampling_strategy="random",
        per_device_train_batch_size=4,
        max_steps=8,
    )
    seen = []
    collate = trainer.collate
    trainer.collate = lambda items: seen.append([d["source"] for d in items]) or collate(items)
    trainer.train()
    first, second = seen[:4], seen[4:8]
    for epoch in (first, second):
        assert sorted(row for batch in epoch for row in batch) == list(range(16))
    assert first != second


def test_what_runs_out_of_memory_is_computed_in_pieces(tmp_path):
    """The same gradient, from fewer rows at a time."""
    expected = direction(make_trainer(tmp_path, per_device_train_batch_size=8))
    trainer = make_trainer(tmp_path, per_device_train_batch_size=8)
    sizes, loss = [], trainer.loss

    def narrow(scores, batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss(scores, batch)

    trainer.loss = narrow
    found = direction(trainer)
    assert max(sizes) == 8 and sum(size for size in sizes if size <= 3) == 8
    assert relative(found, expected) <= 1e-6
    tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    assert logged(trainer, "num_tokens") == [tokens]


@pytest.mark.parametrize("non_finite", ["raise", "skip"])
def test_a_loss_of_nan(tmp_path, non_finite):
    trainer = make_trainer(tmp_path, non_finite=non_finite)
    loss = trainer.loss

    def ruined(scores, batch):
        return {name: (x * torch.nan, total) for name, (x, total) in loss(scores, batch).items()}

    trainer.loss = ruined
    before = weights(trainer.model)
    if non_finite == "raise":
        with pytest.raises(Exception, match="NaN or infinite"):
            trainer.train()
    else:
        trainer.train()
        assert logged(trainer, "frac_skipped_updates") == [1.0]
    assert torch.equal(weights(trainer.model), before)


def test_evaluating_takes_a_dataset(tmp_path):
    with pytest.raises(ValueError, match="There is no eval_dataset: pass one here"):
        make_trainer(tmp_path, texts(4)).evaluate()


ROW = 500  # tokens


def tokenized(folder, rows, columns):
    """A dataset on disk with other random ids in each row, and a label."""
    rng = np.random.default_rng(rows)
    ids = {name: rng.integers(8, 60, (rows, ROW // len(columns))).tolist() for name in columns}
    path = str(folder / str(rows))
    Dataset.from_dict(ids | {"label": [True, False] * (rows // 2)}).save_to_disk(path)
    return load_from_disk(path)


POOLS = []  # in which buffers may lie until their trainers are collected


def peak_of(call):
    """Most bytes that Python, numpy and Arrow held at once while a function ran."""
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


@pytest.mark.parametrize(
    ("runs", "columns"),
    [
        (make_trainer, ["input_ids"]),
        (dpo_runs.make_trainer, ["chosen_ids", "rejected_ids"]),
        (kto_runs.make_trainer, ["prompt_ids", "completion_ids"]),
        (reward_runs.make_trainer, ["chosen_ids", "rejected_ids"]),
    ],
    ids=["sft", "dpo", "kto", "reward"],
)
def test_memory_of_preparing_hardly_grows_with_the_tokens(tmp_path, runs, columns):
    """By less than half a byte a token, which is four bytes on disk; rows have a few numbers."""
    few, many = 3_000, 5_000
    peaks = []
    for rows in (few, many):
        data = tokenized(tmp_path, rows, columns)
        peaks.append(peak_of(partial(runs, tmp_path, data, max_length=ROW + 10)))
    assert peaks[1] - peaks[0] < 0.5 * (many - few) * ROW


@pytest.mark.parametrize("reads", ["a stream", "while training"])
def test_what_is_read_while_training_is_checked(tmp_path, log, reads):
    """Rows longer than the context are told of once, and ids that the model lacks are refused."""
    rows = [[8] * 300, [9] * 20, [8] * 400]

    def train(rows):
        data = Dataset.from_dict({"input_ids": rows})
        data = data.to_iterable_dataset() if reads == "a stream" else data
        options = {"lazy_tokenization": reads == "while training", "max_length": None}
        make_trainer(tmp_path, data, per_device_train_batch_size=1, max_steps=3, **options).train()

    train(rows)
    told = [line for line in log.messages if "max_position_embeddings" in line]
    expected = (
        "Rows are longer than the 256 tokens that the model sees (max_position_embeddings): first "
        "row 0, at most 300 tokens. To cut them, set max_length=256. Further ones are only counted."
    )
    assert told[0] == expected and all("Rows of the stream" in line for line in told[1:])
    with pytest.raises(ValueError, match="Row 1 of the dataset has the token id 95, but"):
        train([[8] * 3, [9, 95, 8], [8] * 3])


def test_a_scaled_context_is_not_told_of(tmp_path, log):
    """Rotary embeddings that are scaled are made for longer rows than a configuration may say."""
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    rows = Dataset.from_dict({"input_ids": [[8] * 300]})
    for parameters, told in ((None, True), (scaled, False)):
        log.clear()
        changes = {} if parameters is None else {"rope_parameters": parameters}
        make_trainer(tmp_path, rows, model=tiny_model(**changes), max_length=None)
        assert ("max_position_embeddings" in log.text) == told


# --- Prepared datasets ---

PREPARED = {
    "sft": (make_trainer, {"input_ids", "labels", "origin"}),
    "dpo": (dpo_runs.make_trainer, {"prompt_ids", "chosen_ids", "rejected_ids", "margin"}),
    "kto": (
        kto_runs.make_trainer,
        {"prompt_ids", "completion_ids", "label", "kl_completion_ids"},
    ),
    "reward": (reward_runs.make_trainer, {"prompt_ids", "chosen_ids", "rejected_ids", "margin"}),
}
prepared_by_each = pytest.mark.parametrize(("runs", "columns"), PREPARED.values(), ids=PREPARED)


@prepared_by_each
@pytest.mark.parametrize("max_length", [64, 22])
def test_a_prepared_dataset_is_one_of_datasets(tmp_path, runs, columns, max_length):
    dataset = runs(tmp_path / "run", max_length=max_length).train_dataset
    assert isinstance(dataset, Dataset)
    assert {*dataset.column_names} == columns | {"source", "merged"}
    first = dataset[0]
    assert first.keys() == {*dataset.column_names} and first["source"] == 0
    assert dataset[:2] == {name: [x[name] for x in (first, dataset[1])] for name in first}
    assert dataset.select([1, 0])[1] == first
    assert dataset.map(lambda row: {"n": row["source"] + 1})[0] == first | {"n": 1}
    dataset.save_to_disk(tmp_path / "saved")
    assert load_from_disk(tmp_path / "saved")[:] == dataset[:]


@prepared_by_each
@pytest.mark.parametrize("through_disk", [False, True])
def test_a_prepared_dataset_is_taken_as_it_is(tmp_path, runs, columns, through_disk):
    first = runs(tmp_path / "first", max_length=24)
    data = first.train_dataset
    if through_disk:
        data.save_to_disk(tmp_path / "saved")
        data = load_from_disk(tmp_path / "saved")
    again = runs(tmp_path / "second", data, max_length=24)
    assert again.train_dataset[:] == first.train_dataset[:]
    for trainer in (first, again):
        trainer.train()
    assert torch.equal(weights(first.model), weights(again.model))
    shorter = runs(tmp_path / "third", data.select(range(1, len(data))), max_length=20)
    assert shorter.train_dataset["source"][0] > 0


@pytest.mark.parametrize("is_lazy", [False, True])
def test_lazy_datasets_and_streams_are_taken_again(tmp_path, is_lazy):
    data = texts(12) if is_lazy else texts(12).to_iterable_dataset()
    options = {"lazy_tokenization": is_lazy, "max_steps": 2, "per_device_train_batch_size": 4}
    first = make_trainer(tmp_path / "first", data, **options)
    again = make_trainer(tmp_path / "second", first.train_dataset, **options)
    assert again.train_dataset is first.train_dataset
    assert again.train_dataset.column_names == make_trainer(tmp_path).train_dataset.column_names
    for trainer in (first, again):
        trainer.train()
    assert torch.equal(weights(first.model), weights(again.model))


def test_a_prepared_dataset_is_evaluated_and_predicted(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset={"a": texts(6), "b": texts(4)})
    found = trainer.evaluate()
    prepared = trainer.eval_dataset["b"]
    assert trainer.evaluate(prepared)["eval_loss"] == found["eval_b_loss"]


def test_an_evaluation_set_may_be_replaced_by_a_raw_one(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset={"a": texts(6), "b": texts(4)})
    found = trainer.evaluate()
    trainer.eval_dataset = texts(6)
    assert trainer.evaluate()["eval_loss"] == found["eval_a_loss"]
    trainer.eval_dataset = {"other": texts(4)}
    assert trainer.evaluate()["eval_other_loss"] == found["eval_b_loss"]


@pytest.mark.parametrize(
    ("runs", "columns"),
    [
        (make_trainer, ["input_ids"]),
        (dpo_runs.make_trainer, ["chosen_ids", "rejected_ids"]),
        (kto_runs.make_trainer, ["prompt_ids", "completion_ids"]),
    ],
    ids=["sft", "dpo", "kto"],
)
def test_cutting_takes_no_memory_for_tokens(tmp_path, runs, columns):
    few, many = 3_000, 5_000
    peaks = []
    for rows in (few, many):
        data = tokenized(tmp_path, rows, columns)
        peaks.append(peak_of(partial(runs, tmp_path, data, max_length=ROW // 2 + 20)))
    assert peaks[1] - peaks[0] < 0.5 * (many - few) * ROW
