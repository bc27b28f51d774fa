import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from transformers import DynamicCache

from trl.generation.transformers.batch_limits import BatchLimits, cache_bytes_per_token

MODEL = tiny_model()
TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, bytes of float32
A, B, C = [1] * 4, [2] * 4, [3] * 9


def cut(limits, prompts, shared=True, max_tokens=6):
    return [(r.start, r.stop) for r in limits.cut(prompts, max_tokens, MODEL, shared)]


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "num_hidden_layers": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_token_are_those_of_a_cache(changes, dtype):
    model = tiny_model(**changes).to(dtype)
    cache = DynamicCache()
    model(torch.arange(10)[None], past_key_values=cache)
    held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert cache_bytes_per_token(model) * 10 == sum(x.numel() * x.element_size() for x in held)


def test_bytes_of_the_tiny_model():
    assert cache_bytes_per_token(MODEL) == TOKEN


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [
        (None, [(0, 7)]),
        (7, [(0, 7)]),
        (100, [(0, 7)]),
        (3, [(0, 3), (3, 6), (6, 7)]),
        (1, [(i, i + 1) for i in range(7)]),
    ],
)
def test_bounded_rows(rows, pieces):
    assert cut(BatchLimits(rows=rows), [A] * 4 + [B] * 3) == pieces


@pytest.mark.parametrize(
    ("tokens", "shared", "pieces"),
    [
        # Each row writes up to 6 tokens; a shared prompt of 4 counts once in each piece.
        (4 + 3 * 6, True, [(0, 3), (3, 5), (5, 7)]),
        (4 + 4 * 6, True, [(0, 4), (4, 7)]),
        (4 + 4 * 6 + 4 + 3 * 6, True, [(0, 7)]),
        (4 + 4 * 6 + 4 + 3 * 6 - 1, True, [(0, 6), (6, 7)]),
        (2 * 10, False, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (7 * 10, False, [(0, 7)]),
        (1, True, [(i, i + 1) for i in range(7)]),
    ],
)
def test_bounded_bytes(tokens, shared, pieces):
    assert cut(BatchLimits(cache_bytes=tokens * TOKEN), [A] * 4 + [B] * 3, shared) == pieces


def test_no_rows_are_no_pieces():
    assert cut(BatchLimits(), []) == [] and cut(BatchLimits(2, 1e9), []) == []


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([A, B, C]), max_size=12),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 60),
    st.booleans(),
)
def test_pieces_are_in_order_within_bounds_and_no_smaller_than_needed(
    prompts, rows, tokens, shared
):
    """A piece is as long as it can be, and has one row at least."""

    def fits(start, stop):
        size, last = 0, None
        for prompt in prompts[start:stop]:
            size += 6 + (0 if shared and prompt == last else len(prompt))
            last = prompt
        within = tokens is None or size <= tokens
        return stop - start == 1 or (within and (rows is None or stop - start <= rows))

    limits = BatchLimits(rows, None if tokens is None else tokens * TOKEN)
    pieces = cut(limits, prompts, shared)
    assert [row for start, stop in pieces for row in range(start, stop)] == [*range(len(prompts))]
    assert all(fits(start, stop) for start, stop in pieces)
    assert not any(fits(start, stop + 1) for start, stop in pieces[:-1])
