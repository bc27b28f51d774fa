"""Weights reach a real engine, and an engine that holds others is found out."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from shared_vllm import (
    backend,
    fresh_engine,
    needs_vllm,
    nudge,
    policy_model,
)
from tensor_bytes import TensorBytes
from vllm_rows import (
    DOWN,
    PROMPTS,
    K,
    Q,
    check_fault_is_found,
    check_missing_weight_is_found,
    check_stop,
    gap,
    sampling,
)

from trl.generation.vllm.engine import VLLMEngine
from trl.generation.vllm.weight_verifier import WeightSyncError, _factors

pytestmark = [needs_vllm, pytest.mark.vllm]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
    ids=["llama", "tied", "qwen3"],
)
def test_every_entry_of_the_engine_is_traced(kind, changes):
    """The map from weights to the engine's fused parameters, for layouts that differ."""
    from shared_vllm import SHAPE
    from tiny import tiny_model

    model = tiny_model(kind, seed=1, **(SHAPE | changes)).eval()
    usual = kind == "llama" and not changes
    found = backend(model, engine_=None if usual else fresh_engine(model))
    found.sync_weights(0)
    assert gap(model, found.generate(PROMPTS, sampling(), 4)) <= 1e-4
    assert found._verifier.unverified == []


def test_text_changes_after_a_step_and_log_probabilities_follow():
    model = policy_model()
    found = backend(model)
    found.sync_weights(0)
    before = found.generate(PROMPTS, sampling(), 4)
    assert gap(model, before) <= 1e-4
    nudge(model)
    found.sync_weights(1)
    after = found.generate(PROMPTS, sampling(), 4)
    assert after.completion_ids != before.completion_ids
    assert gap(model, after) <= 1e-4 < gap(model, before)


def test_a_sync_needs_memory_for_one_layer():
    """Above the policy and the engine: a merged copy of one layer, and what is made of it."""
    model = policy_model(num_hidden_layers=24)
    holder = fresh_engine(model)
    options = {"target_modules": ["up_proj", "q_proj"], "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(**options)).eval()
    found = backend(model, engine_=holder, probe_syncs=0)
    found.generate(PROMPTS, sampling(max_tokens=1), 4)
    nudge(model)
    found.sync_weights(1)
    held = [
        *model.parameters(),
        *model.buffers(),
        *holder.model.parameters(),
        *holder.model.buffers(),
    ]
    held.append(_factors(torch.device("cpu")))  # which stay from the first sync on
    made = TensorBytes(held)
    before = made.live
    with made, found.awake():
        pass
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert max(sizes) <= made.peak - before <= 10 * max(sizes) <= sum(sizes) / 5
    assert found._synced[0] == 1


def test_weights_that_moved_without_a_step_are_sent():
    """As after loading the best checkpoint, or evaluating another one."""
    model = policy_model()
    found = backend(model)
    found.sync_weights(3)
    found.generate(PROMPTS, sampling(), 4)
    nudge(model)
    found.sync_weights(3)
    assert gap(model, found.generate(PROMPTS, sampling(), 4)) <= 1e-4


def test_weights_are_sent_once_a_step():
    model = policy_model()
    found = backend(model)
    for step in (0, 0, 1, 1):
        found.sync_weights(step)
        found.generate(PROMPTS, sampling(), 4)
    metrics = [name for name, _ in found.take_metrics()]
    assert metrics.count("vllm/sync_seconds") == 2 == metrics.count("vllm/logp_gap")


def test_filters_change_the_reported_log_probabilities_as_they_change_the_draw():
    model = policy_model()
    found = backend(model)
    found.sync_weights(0)
    drawn = found.generate(PROMPTS, sampling(temperature=0.5, top_k=3), 4)
    for ids, logps in zip(drawn.completion_ids, drawn.sampling_logps, strict=True):
        every = model(torch.tensor([PROMPTS.token_ids[0] + ids])).logits[0].detach() / 0.5
        for place, (token, logp) in enumerate(zip(ids, logps, strict=True)):
            kept, which = every[len(PROMPTS.token_ids[0]) - 1 + place].topk(3)
            expected = kept.log_softmax(0)[which.tolist().index(token)]
            assert abs(logp - expected) <= 1e-4


# --- Faults ---


class FaultyEngine(VLLMEngine):
    """Loads one weight wrongly, from the given sync on."""

    name, fault, first = Q, "skip", 1

    def __init__(self, llm, sleeps=False):
        super().__init__(llm, sleeps)
        self.count = 0
        self.old = {}

    def load(self, name, weight):
        if name != self.name:
            return super().load(name, weight)
        self.count += 1
        if self.count < self.first:
            self.old[name] = weight.clone()
            return super().load(name, weight)
        if self.fault == "stale":
            return super().load(name, self.old[name])
        if self.fault == "transposed":
            return super().load(name, weight.T)
        if self.fault == "zero":
            return super().load(name, torch.zeros_like(weight))
        return None  # skipped


def faulty(**settings):
    return type("Faulty", (FaultyEngine,), settings)


def square_model():
    """Queries as wide as the hidden states, so that a transposed weight has the right shape."""
    return policy_model(num_attention_heads=2, num_key_value_heads=2)


@pytest.mark.parametrize("name", [Q, K, DOWN])
@pytest.mark.parametrize("fault", ["skip", "stale", "zero"])
def test_a_weight_that_did_not_arrive_stops_training(fault, name):
    kind = faulty(name=name, fault=fault, first=2)
    check_fault_is_found(partial(backend, kind=kind), name)


def test_a_weight_that_is_skipped_from_the_beginning_stops_training():
    found = backend(policy_model(), faulty(fault="skip"), probe_syncs=0)
    found.sync_weights(0)
    words = r"entries of the engine's model.layers.0.self_attn.qkv_proj.weight were not loaded"
    with pytest.raises(WeightSyncError, match=words):
        found.generate(PROMPTS, sampling(), 4)


def test_a_transposed_weight_stops_training():
    model = square_model()
    kind = faulty(fault="transposed", first=2)
    found = backend(model, engine_=kind(fresh_engine(model)._llm), probe_syncs=0)
    found.sync_weights(0)
    found.generate(PROMPTS, sampling(), 4)
    check_stop(found, f"{Q} differs from what was sent")


def test_a_weight_that_is_no_longer_sent_stops_training():
    check_missing_weight_is_found(backend)


def test_old_weights_sent_as_new_ones_show_in_log_probabilities():
    """The engine holds what it was sent; that this is not the policy only a probe can tell."""
    model, old = policy_model(), policy_model()
    found = backend(model, weights=lambda _: iter(old.named_parameters()))
    found.sync_weights(0)
    found.generate(PROMPTS, sampling(), 4)
    nudge(model)
    found.sync_weights(1)
    with pytest.raises(WeightSyncError, match="log-probabilities of a probe differ by"):
        found.generate(PROMPTS, sampling(), 4)


def test_training_can_go_on_after_a_sync_that_failed():
    model, skipped = policy_model(), [Q]
    weights = lambda model: ((n, p) for n, p in model.named_parameters() if n not in skipped)  # noqa: E731
    found = backend(model, weights=weights)
    with pytest.raises(WeightSyncError):
        found.generate(PROMPTS, sampling(), 4)
    skipped.clear()
    assert gap(model, found.generate(PROMPTS, sampling(), 4)) <= 1e-4
