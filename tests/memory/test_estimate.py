"""Whole training steps of small models: every tensor counted against the arithmetic."""

import pytest
from datasets import Dataset
from online_runs import make_trainer, token_sum
from peft import LoraConfig
from tiny import tiny_model

from trl.memory.estimate import PHASES, Estimate
from trl.memory.model_size import model_size
from trl.memory.probes import TensorBytes
from trl.memory.settings import Parts, RunSettings
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

PROMPT, COMPLETION, GROUP = 300, 24, 4
SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
ADAPTER = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def long_script(ids, place):
    """Completions of the full length that differ between rows."""
    return [10 + (place * 5 + i) % 60 for i in range(COMPLETION)]


def settings(**changes):
    fields = {"group_size": GROUP, "prompt": PROMPT, "completion": COMPLETION, "micro_batch": 4}
    fields |= {"gradient_checkpointing": False, "optimizer": "sgd", "on_cpu": True}
    return RunSettings(**(fields | changes))


def peak_of_training(folder, kind, model, **options):
    """Train two updates on completions that are given; return the most bytes at once."""
    data = Dataset.from_dict({"prompt": ["a" * PROMPT, "b" * PROMPT, "c" * PROMPT, "d" * PROMPT]})
    options = {"max_completion_length": COMPLETION, "per_device_train_batch_size": 4} | options
    tracker = TensorBytes(model.parameters())
    trainer = make_trainer(
        folder,
        kind,
        model=model,
        reward=token_sum,
        data=data,
        script=long_script,
        log_memory=False,
        max_steps=2,
        **options,
    )
    with tracker:
        for parameter in trainer.model.parameters():
            tracker.add(parameter.data)
        trainer.train()
    return tracker.peak


CASES = {
    "plain": ({}, {}),
    "checkpointing": ({"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
    "rows of their own": ({"shared_prefix": False}, {"shared_prefix": False}),
    "all logits": ({"logits_chunk_size": 0}, {"logits_chunk": 0}),
    "adam": ({"optim": "adamw_torch"}, {"optimizer": "adamw_torch"}),
    "micro-batches": (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"micro_batch": 2, "slices": 4, "accumulation": 4},
    ),
    "autocast": ({"bf16": True}, {"product_bytes": 2}),
    "autocast, checkpointing": (
        {"bf16": True, "gradient_checkpointing": True},
        {"product_bytes": 2, "gradient_checkpointing": True},
    ),
    "off-policy": (
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
        {"slices": 2, "scores_policy": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_peak_of_training(tmp_path, name, tied):
    options, changes = CASES[name]
    model = tiny_model("qwen3", tie_word_embeddings=tied, **SHAPE)
    size = model_size(model.config)
    measured = peak_of_training(tmp_path, GRPOTrainer, model, **options)
    assert Estimate(size, settings(**changes)).peak == pytest.approx(measured, rel=0.1)


def test_peak_with_a_reference(tmp_path):
    model = tiny_model("llama", **SHAPE)
    size = model_size(model.config)
    measured = peak_of_training(tmp_path, RLOOTrainer, model, beta=0.1)
    run = settings(reference=True, scores_policy=True)
    assert Estimate(size, run).peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_peak_with_an_adapter(tmp_path, checkpointing):
    model = tiny_model("llama", **SHAPE)
    size = model_size(model.config, ADAPTER)
    options = {"peft_config": ADAPTER, "gradient_checkpointing": checkpointing, "beta": 0.1}
    measured = peak_of_training(tmp_path, RLOOTrainer, model, **options)
    run = settings(reference=True, scores_policy=True, gradient_checkpointing=checkpointing)
    assert Estimate(size, run).peak == pytest.approx(measured, rel=0.1)


@pytest.fixture
def size():
    return model_size(tiny_model("qwen3", **SHAPE).config)


def test_what_is_held_in_every_phase(size):
    run = settings(reference=True, optimizer="adamw_torch", accumulation=2)
    phases = Estimate(size, run).phases
    assert tuple(phases) == PHASES
    weights = 4 * size.parameters
    for parts in phases.values():
        assert (parts.weights, parts.reference, parts.optimizer) == (weights, weights, 2 * weights)
    # A round is generated and scored while the first of two updates' gradients wait.
    assert [parts.gradients for parts in phases.values()][:2] == [weights, weights]
    expected = Parts(weights, weights, gradients=weights, optimizer=2 * weights)
    assert phases["optimizer"] == expected


def test_phases_that_do_not_happen_are_left_out(size):
    assert "scoring" not in Estimate(size, settings()).phases
    assert "scoring" in Estimate(size, settings(scores_policy=True)).phases


def test_an_adapter_has_no_reference_and_small_states():
    size = model_size(tiny_model("llama", **SHAPE).config, ADAPTER)
    run = settings(reference=True, optimizer="adamw_torch", weight_bytes=2, product_bytes=2)
    held = Estimate(size, run).phases["optimizer"]
    # Adapters are float32 whatever the base model is.
    assert held.weights == 2 * (size.parameters - size.adapter) + 4 * size.adapter
    assert held.reference == 0
    assert (held.gradients, held.optimizer) == (4 * size.adapter, 8 * size.adapter)


def test_quantized_layers(size):
    run = settings(matrix_bytes=0.5)
    expected = 0.5 * size.layer_matrices + 4 * (size.parameters - size.layer_matrices)
    assert Estimate(size, run).phases["optimizer"].weights == expected


def test_ranks_exchange_gradients_in_buckets(size):
    one, two = (Estimate(size, settings(processes=n)).phases["optimizer"] for n in (1, 2))
    assert two.gradients == 2 * one.gradients
