"""What a resumed run must share with the run that wrote the checkpoint."""

from dataclasses import fields

import pytest
import torch
from datasets import Dataset, IterableDataset
from online_runs import config, make_trainer
from tiny import tiny_model

from trl.trainer.base.run_settings import (
    FREE,
    FREE_PREFIXES,
    describe_dataset,
    describe_model,
    describe_options,
    differences,
    fingerprint,
)
from trl.trainer.grpo_config import GRPOConfig


def test_free_options_exist():
    known = {field.name for field in fields(GRPOConfig)}
    assert known >= FREE
    assert all(any(name.startswith(prefix) for name in known) for prefix in FREE_PREFIXES)


def test_options_of_the_mathematics_are_not_free():
    described = describe_options(config("out", GRPOConfig))
    for name in (
        *("seed", "num_generations", "learning_rate", "beta", "temperature", "loss_type"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"),
        *("optim", "max_grad_norm", "reward_weights", "sync_ref_model", "shuffle_dataset"),
        *("weight_decay", "lr_scheduler_type", "warmup_steps", "bf16", "ignore_data_skip"),
    ):
        assert name in described, name


def test_the_same_options_are_described_alike():
    class Odd:
        """Shows where it is in memory."""

    first, second = (config("out", generation_kwargs={"x": Odd()}) for _ in range(2))
    assert describe_options(first) == describe_options(second)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (["a", "b", "c"], True),
        (["a", "b"], False),
        (["a", "b", "d"], False),
        (["b", "a", "c"], False),
    ],
)
def test_datasets_are_told_apart(changed, same):
    plain = {"prompt": ["a", "b", "c"]}
    mine = describe_dataset(Dataset.from_dict(plain))
    other = describe_dataset(Dataset.from_dict({"prompt": changed}))
    assert (mine == other) is same
    extra = Dataset.from_dict(plain | {"answer": [b"1", b"2", b"3"]})
    assert describe_dataset(extra) != mine
    assert describe_dataset(extra.with_transform(lambda rows: {"prompt": ["?"]})) == (
        describe_dataset(extra)
    )


def test_a_large_dataset_is_sampled_to_its_end():
    rows = {"prompt": [str(i) for i in range(5000)]}
    mine = describe_dataset(Dataset.from_dict(rows))
    assert mine["train_dataset's number of rows"] == 5000
    rows["prompt"][2500] = "changed"
    assert describe_dataset(Dataset.from_dict(rows)) != mine


def test_of_a_stream_the_first_row_is_read():
    read = []

    def rows(first):
        for prompt in (first, "b", "c"):
            read.append(prompt)
            yield {"prompt": prompt}

    def stream(first):
        return IterableDataset.from_generator(rows, gen_kwargs={"first": first})

    mine = describe_dataset(stream("a"))
    assert read == ["a"]
    assert describe_dataset(stream("a")) == mine != describe_dataset(stream("z"))


def test_models_are_told_apart_by_what_no_checkpoint_holds():
    mine = describe_model(tiny_model(seed=0))
    assert describe_model(tiny_model(seed=0)) == mine
    assert describe_model(tiny_model(seed=1)) == mine, "trained weights come from the checkpoint"
    assert describe_model(tiny_model(num_hidden_layers=1)) != mine
    assert describe_model(tiny_model().to(torch.bfloat16)) != mine
    frozen = [tiny_model(seed=seed).requires_grad_(False) for seed in (0, 0, 1)]
    first, again, other = map(describe_model, frozen)
    assert first == again != other


def test_a_fingerprint_sees_each_tensor():
    weights = {"a": torch.zeros(1000), "b": torch.zeros(3)}
    plain = fingerprint(weights)
    for name, place in (("a", 0), ("b", 2)):
        changed = {key: value.clone() for key, value in weights.items()}
        changed[name][place] = 1.0
        assert fingerprint(changed) != plain
    assert fingerprint({"b": weights["b"], "a": weights["a"]}) == plain


def test_differences_name_both_values():
    saved = {"seed": 1, "gone": 2, "same": [1]}
    assert differences(saved, {"seed": 3, "new": 4, "same": [1]}) == [
        "seed: 1 in the checkpoint, 3 now"
    ]
    assert "..." in differences({"x": "a" * 200}, {"x": "b"})[0]


def test_processes_rewards_and_reference_count(tmp_path):
    settings = {"model": tiny_model(seed=3), "beta": 0.1}
    mine = make_trainer(tmp_path, **settings).run_settings
    assert mine["number of processes"] == 1
    assert mine["reward functions"] == ["token_sum"]
    settings["model"] = tiny_model(seed=4)
    changes = differences(mine, make_trainer(tmp_path, **settings).run_settings)
    assert [change.split(":")[0] for change in changes] == ["the reference's weights (fingerprint)"]
