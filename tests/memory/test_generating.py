"""Rows, cache and working memory against real decoding."""

from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_model

from trl.generation.transformers.backend import TransformersBackend
from trl.generation.transformers.batch_limits import BatchLimits
from trl.generation.transformers.shared_decoding import PREFILL_TOKENS as REAL_PREFILL_TOKENS
from trl.generation.transformers.shared_decoding import GrowingCache
from trl.memory.estimate import Estimate
from trl.memory.generating import PREFILL_TOKENS, Generation
from trl.memory.model_size import model_size
from trl.memory.probes import TensorBytes
from trl.memory.settings import RunSettings
from trl.types import Prompts, Sampling

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}


def settings(prompts, **changes):
    fields = {"group_size": 4, "prompt": 100, "completion": 40, "on_cpu": True} | changes
    return RunSettings(micro_batch=prompts * fields["group_size"], optimizer="sgd", **fields)


def generation(run, model):
    estimate = Estimate(model_size(model.config), run)
    return Generation(estimate.model, run, estimate.layer, estimate.head)


def decode(model, run, limits):
    """Generate a round twice; return the most bytes of the second time, weights included."""
    backend = TransformersBackend(
        lambda: nullcontext(model),
        pad_id=0,
        device=CPU,
        shared_prefix=run.shared_prefix,
        limits=limits,
    )
    rows = range(run.rows)
    sampling = Sampling(max_tokens=run.completion, stop_ids=(), seeds=tuple(rows))
    for first in (3, 50):  # the first time both ways of decoding are compared
        ids = [[first + row // run.group_size] * run.prompt for row in rows]
        with torch.no_grad(), TensorBytes(model.parameters()) as tracker:
            prompts = Prompts(messages=["text"] * run.rows, token_ids=ids)
            backend.generate(prompts, sampling, run.group_size)
    return tracker.peak


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt": 600, "completion": 3},
        {"group_size": 16, "completion": 100},
        {"group_size": 8, "completion": 40, "generation_rows": 4},
        {"shared_prefix": False},
        {"shared_prefix": False, "prompt": 20, "completion": 100},
    ],
    ids=["balanced", "prompts", "completions", "pieces", "padded", "padded completions"],
)
def test_peak_of_a_round(changes):
    model = tiny_model("llama", **SHAPE).eval()
    run = settings(2, **changes)
    measured = decode(model, run, BatchLimits(run.generation_rows))
    predicted = Estimate(model_size(model.config), run).phases["generation"].total
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("completion", [1, 2, 3, 17, 18, 35, 36, 100, 1000])
def test_room_in_the_cache(completion):
    cache = GrowingCache(completion)
    for _ in range(completion - 1):  # the last token is never looked at
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    room = cache._buffers[0][0].shape[2] if completion > 1 else 0
    run = settings(1, completion=completion)
    assert generation(run, tiny_model("llama")).capacity() == room


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [None, 3, 5])
@pytest.mark.parametrize("tokens", [None, 50, 300, 700, 10_000])
def test_rows_in_flight_are_those_of_the_largest_piece(shared, rows, tokens):
    model = tiny_model("llama", **SHAPE)
    run = settings(3, shared_prefix=shared, generation_rows=rows)
    each = generation(run, model).token
    run = run.replace(generation_kv_gb=None if tokens is None else (tokens + 0.5) * each / 1e9)
    cache_bytes = None if tokens is None else (tokens + 0.5) * each
    ids = [[row // run.group_size] * run.prompt for row in range(run.rows)]
    pieces = list(BatchLimits(rows, cache_bytes).cut(ids, run.completion, model, shared))
    most = max(len(piece) for piece in pieces)
    copies = [len({row // 4 for row in piece}) if shared else len(piece) for piece in pieces]
    found = generation(run, model).in_flight()
    assert found[0] == most
    assert max(copies) <= found[1] <= max(copies) + 1


def test_prompts_are_computed_a_few_at_a_time():
    assert PREFILL_TOKENS == REAL_PREFILL_TOKENS
    model = tiny_model("llama", **SHAPE)
    few, many = (generation(settings(n, prompt=2048), model).moments()[0] for n in (2, 20))
    assert few[2] == many[2]
    assert many[0] == 10 * few[0]
