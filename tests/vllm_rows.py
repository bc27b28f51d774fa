"""The rows that tests complete with a vLLM engine, and names of weights to tamper with."""

import pytest
import torch
from backend_contract import model_logps
from shared_vllm import nudge, policy_model

from trl.generation.base import Sampling
from trl.generation.vllm.weight_verifier import WeightSyncError
from trl.types import Prompts

PROMPTS = Prompts(messages=["a"] * 4, token_ids=[[20 + n for n in range(40)]] * 4)
Q, K, DOWN = (
    f"model.layers.{place}.weight"
    for place in ("0.self_attn.q_proj", "1.self_attn.k_proj", "1.mlp.down_proj")
)


def sampling(**changes):
    return Sampling(**({"max_tokens": 12, "seeds": (1, 2, 3, 4)} | changes))


def gap(model, found, temperature=1.0):
    """Largest difference of a log-probability from the model's own."""
    return max(
        (torch.tensor(logps) - model_logps(model, PROMPTS.token_ids[0], ids, temperature))
        .abs()
        .max()
        .item()
        for ids, logps in zip(found.completion_ids, found.sampling_logps, strict=True)
    )


def check_stop(backend, words):
    """The sync before the next generation does not bring the policy's weights; training stops."""
    backend.sync_weights(1)
    with pytest.raises(WeightSyncError, match=words):
        backend.generate(PROMPTS, sampling(), 4)


def check_fault_is_found(make_backend, name):
    """A weight that does not arrive at the second sync is found, however little it moved."""
    model = policy_model()
    found = make_backend(model, probe_syncs=0)
    found.generate(PROMPTS, sampling(), 4)
    nudge(model, 1e-6)  # far too little for log-probabilities to show
    check_stop(found, rf"Step 1.*{name} differs from what was sent")


def check_missing_weight_is_found(make_backend):
    """A policy that sends one weight less than before is found."""
    model, skipped = policy_model(), []
    some = lambda model: ((n, p) for n, p in model.named_parameters() if n not in skipped)  # noqa: E731
    found = make_backend(model, weights=some)
    found.generate(PROMPTS, sampling(), 4)
    skipped.append(DOWN)
    check_stop(found, f"{DOWN} was not sent, unlike at earlier syncs")
