"""Engines of transformers, made from options; those of vLLM are in vllm/test_factory.py."""

import json

import pytest
import torch
from online_runs import dataset, make_trainer, weights

from trl.distributed import Ranks
from trl.generation.transformers.backend import TransformersBackend
from trl.generation.transformers.continuous import ContinuousBackend

CONTINUOUS = {"use_transformers_continuous_batching": True, "script": None}


def run(folder, **changes):
    """Train and evaluate; returns the trainer and what it wrote in each mode."""
    trainer = make_trainer(
        folder, eval_dataset=dataset(), per_device_eval_batch_size=4, max_steps=2,
        num_generations_eval=2, eval_strategy="steps", eval_steps=1, **changes,
    )  # fmt: skip
    trainer.train()
    written = {
        mode: [
            json.loads(line)["completion_ids"]
            for line in (folder / "completions" / f"{mode}.jsonl").read_text().splitlines()
        ]
        for mode in ("train", "eval")
    }
    return trainer, written


@pytest.mark.slow
def test_continuous_batching_trains_and_evaluates_as_the_default_does(tmp_path):
    usual, expected = run(tmp_path / "usual", script=None)
    found, written = run(tmp_path / "continuous", **CONTINUOUS)
    assert isinstance(usual.backend, TransformersBackend)
    assert isinstance(found.backend, ContinuousBackend)
    assert written == expected and len(written["eval"]) == 2 * 4 * 2
    assert torch.equal(weights(found.model), weights(usual.model))
    names = {name for row in found.state.log_history for name in row}
    assert names == {name for row in usual.state.log_history for name in row}


@pytest.mark.slow
def test_continuous_batching_casts_nothing(tmp_path):
    trainer, written = run(tmp_path, bf16=True, **CONTINUOUS)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert len(written["train"]) == 16


@pytest.mark.parametrize(
    "change",
    [{"cache_implementation": "dynamic"}, {"generation_max_rows": 2}, {"generation_max_kv_gb": 1}],
)
def test_options_that_continuous_batching_cannot_honor(tmp_path, change):
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"cannot be used with {name}"):
        make_trainer(tmp_path, **CONTINUOUS, **change)


@pytest.mark.parametrize(
    ("shares", "gather", "in_lockstep"),
    [(False, False, False), (True, True, False), (True, False, True)],
)
def test_sharded_layers_run_in_step_unless_they_are_gathered_at_once(
    tmp_path, monkeypatch, shares, gather, in_lockstep
):
    monkeypatch.setattr(Ranks, "shards_weights", shares)
    trainer = make_trainer(tmp_path, ds3_gather_for_generation=gather)
    assert trainer.policy.layers_in_lockstep == in_lockstep


def test_options_of_continuous_batching_are_checked(tmp_path):
    with pytest.raises(ValueError, match="Did you mean page_size"):
        make_trainer(
            tmp_path, **CONTINUOUS, transformers_continuous_batching_config={"page_sizes": 8}
        )
