"""Attention of packed rows against masked attention over all of them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from trl.models.packed_attention import (
    KEYWORD,
    Decoding,
    Packing,
    decoding_attention,
    install,
    packed_attention,
    visible,
)

SCALE = 0.3
GROUPS = {
    "one": [(5, [3, 4])],
    "tails of all sizes": [(4, [0, 1, 2, 3, 4, 7, 8, 9, 16, 17])],
    "no tails": [(5, []), (3, [0, 0])],
    "many groups": [(1 + i % 4, [i % 5, 2, (3 * i) % 7]) for i in range(12)],
    "long tails": [(1, [33, 5]), (40, [1, 1, 1])],
}
HEADS = [(4, 4), (4, 2), (6, 1)]


def mask_of(groups):
    """Which tokens see which, token by token: prefixes of all groups, then all tails."""
    owners = [(group, None) for group, (prefix, _) in enumerate(groups) for _ in range(prefix)]
    owners += [
        (group, tail)
        for group, (_, tails) in enumerate(groups)
        for tail, length in enumerate(tails)
        for _ in range(length)
    ]
    return torch.tensor(
        [
            [
                there <= here and groups_there == group and tail_there in (None, tail)
                for there, (groups_there, tail_there) in enumerate(owners)
            ]
            for here, (group, tail) in enumerate(owners)
        ]
    )


def inputs(total, heads, dtype):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, total, 8, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]


def masked(query, key, value, mask):
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=SCALE
    )


def error(ours, theirs):
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_packed_attention_is_masked_attention(kind, heads, dtype, bound):
    groups = GROUPS[kind]
    packing, mask = Packing.of(groups, "cpu"), mask_of(groups)
    tensors = inputs(len(mask), heads, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = masked(*exact, mask)
    found = packed_attention(tensors[0], (tensors[1], tensors[2]), packing, 0, SCALE)
    assert found.shape == expected.shape and found.dtype == dtype
    assert error(found, expected) < bound
    upstream = torch.linspace(-1, 1, expected.numel()).double().view(expected.shape)
    wanted = torch.autograd.grad(expected, exact, upstream)
    got = torch.autograd.grad(found, tensors, upstream.to(dtype))
    assert all(error(one, other) < bound for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kind", ["tails of all sizes", "many groups"])
def test_half_precision_is_as_good_as_masked_attention(kind):
    groups = GROUPS[kind]
    mask = mask_of(groups)
    tensors = inputs(len(mask), (4, 2), torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = masked(*exact, mask)
    upstream = torch.linspace(-1, 1, expected.numel()).view(expected.shape).bfloat16()
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    errors = []
    for found in (
        packed_attention(tensors[0], (tensors[1], tensors[2]), Packing.of(groups, "cpu"), 0, SCALE),
        masked(*tensors, mask),
    ):
        got = [found, *torch.autograd.grad(found, tensors, upstream)]
        errors.append([error(a, b) for a, b in zip(got, wanted, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert ours < 2 * theirs + 1e-3 and ours < 0.02


def test_strides_do_not_matter():
    """Projections come as views of (1, T, N, D)."""
    groups = GROUPS["many groups"]
    packing, mask = Packing.of(groups, "cpu"), mask_of(groups)
    tensors = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x in inputs(len(mask), (4, 2), torch.float64)
    ]
    found = packed_attention(tensors[0], (tensors[1], tensors[2]), packing, 0, SCALE)
    expected = masked(*tensors, mask)
    assert error(found, expected) < 1e-12
    upstream = torch.randn(1, len(mask), 4, 8, dtype=torch.float64).transpose(1, 2)
    got = torch.autograd.grad(found, tensors, upstream)
    wanted = torch.autograd.grad(expected, tensors, upstream)
    assert all(error(one, other) < 1e-12 for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kind", GROUPS)
def test_the_mask_a_packing_stands_for(kind):
    groups = GROUPS[kind]
    expected = mask_of(groups)
    assert torch.equal(visible(Packing.of(groups, "cpu"), len(expected)), expected)


def test_tails_of_similar_length_are_computed_together():
    """Lengths between two powers of two, so that less than half of a bucket is repeats."""
    packing = Packing.of([(4, [1, 2, 3, 7, 0, 4]), (2, [5, 8, 15])], "cpu")
    lengths = [sorted(bucket.exists.sum(1).tolist()) for bucket in packing.buckets]
    assert sorted(lengths) == [[1], [2, 3], [4, 5, 7], [8, 15]]
    for bucket in packing.buckets:
        index, exists, own = bucket.index, bucket.exists, []
        assert index.shape == exists.shape == (len(index), int(exists.sum(1).max()))
        assert exists.float().mean() > 0.5
        for places, real in zip(index.tolist(), exists.sum(1).tolist(), strict=True):
            run = list(range(places[0], places[0] + real))
            assert places == run + [run[-1]] * (len(places) - real)
            own += run
        assert bucket.places.tolist() == index.flatten()[bucket.cells].tolist() == own


# --- Decoding ---


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("own", [1, 6])
def test_decoding_is_attention_to_prefix_and_own_tokens(heads, own):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, 8, generator=generator, dtype=torch.float64)

    lengths, groups = (3, 1, 7), (slice(0, 2), slice(2, 3), slice(3, 6))
    prefixes = [[(draw(1, heads[1], n), draw(1, heads[1], n)) for n in lengths] for _ in range(2)]
    query = draw(6, heads[0], 1)
    new = draw(6, heads[1], own), draw(6, heads[1], own)
    decoding = Decoding(
        groups,
        tuple(tuple(key for key, _ in layer) for layer in prefixes),
        tuple(tuple(value for _, value in layer) for layer in prefixes),
    )
    for layer in range(2):
        found = decoding_attention(query, new, decoding, layer, SCALE)
        for row in range(6):
            key, value = prefixes[layer][next(i for i, g in enumerate(groups) if row < g.stop)]
            keys = torch.cat([key, new[0][row : row + 1]], 2)
            values = torch.cat([value, new[1][row : row + 1]], 2)
            expected = masked(query[row : row + 1], keys, values, None)
            assert error(found[row : row + 1], expected) < 1e-12


# --- Installing ---


@pytest.fixture
def implementation():
    """An attention of its own, which notes what it was called with."""
    calls = []

    def attention(module, query, key, value, mask, **kwargs):
        calls.append((module, query, key, value, mask, kwargs))
        return query * 2, "weights"

    AttentionInterface.register("noted", attention)
    yield calls, attention
    del AttentionInterface._global_mapping["noted"]


def attend(name, *args, **kwargs):
    return AttentionInterface._global_mapping[name](*args, **kwargs)


def test_without_the_keyword_nothing_changes(implementation):
    calls, original = implementation
    install("noted")
    query = torch.ones(1, 2, 3, 4)
    mask = object()
    found = attend("noted", "module", query, query, query, mask, scaling=0.5, dropout=0.1)
    assert torch.equal(found[0], query * 2) and found[1] == "weights"
    assert len(calls) == 1 and calls[0][1] is query
    assert calls[0][4] is mask and calls[0][5] == {"scaling": 0.5, "dropout": 0.1}
    assert AttentionInterface._global_mapping["noted"].trl_original is original


def test_installing_twice_wraps_once(implementation):
    _, original = implementation
    install("noted")
    once = AttentionInterface._global_mapping["noted"]
    install("noted")
    assert AttentionInterface._global_mapping["noted"] is once
    assert once.trl_original is original


def test_sdpa_gives_the_same_bits_with_and_without():
    install("sdpa")
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False, layer_idx=0)
    query, key, value = (x.detach() for x in inputs(9, (4, 2), torch.float32))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    for given in (None, mask):
        ours = attend("sdpa", module, query, key, value, given, scaling=SCALE)[0]
        original = AttentionInterface._global_mapping["sdpa"].trl_original
        assert torch.equal(ours, original(module, query, key, value, given, scaling=SCALE)[0])


@pytest.mark.parametrize("scaling", [None, 0.7])
def test_with_the_keyword_the_layout_decides(implementation, scaling):
    """Queries and keys that rotary embeddings left in float32 take the dtype of the values."""
    calls, _ = implementation
    install("noted")
    groups = GROUPS["many groups"]
    packing, mask = Packing.of(groups, "cpu"), mask_of(groups)
    query, key, value = (x.detach() for x in inputs(len(mask), (4, 2), torch.float32))
    module = SimpleNamespace(layer_idx=0)
    options = {KEYWORD: packing, "scaling": scaling}
    found, nothing = attend("noted", module, query.double(), key.double(), value, None, **options)
    expected = nn.functional.scaled_dot_product_attention(
        query,
        *(x.repeat_interleave(2, 1) for x in (key, value)),
        attn_mask=mask,
        scale=8**-0.5 if scaling is None else scaling,
    )
    assert nothing is None and not calls and found.dtype == torch.float32
    assert error(found, expected.transpose(1, 2)) < 1e-5


def test_a_soft_cap_has_no_layout(implementation):
    install("noted")
    query = torch.ones(1, 2, 3, 8)
    options = {KEYWORD: Packing.of([(3, [])], "cpu"), "softcap": 5.0}
    with pytest.raises(NotImplementedError, match="soft-capped"):
        attend("noted", SimpleNamespace(layer_idx=0), query, query, query, None, **options)


def test_models_may_name_the_mask():
    """Doge hands it on by name, where others hand it on by place."""
    install("sdpa")
    attention = AttentionInterface._global_mapping["sdpa"]
    query, key, value = (torch.randn(2, 2, 5, 8) for _ in range(3))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    module = nn.Module()
    module.is_causal = True
    by_place, _ = attention(module, query, key, value, mask)
    by_name, _ = attention(module, query, key, value, attention_mask=mask)
    assert torch.equal(by_place, by_name)


def test_masks_that_layers_make_are_not_dropped():
    """Doge adds a bias that depends on the values; the layout would not see it."""
    install("sdpa")
    attention = AttentionInterface._global_mapping["sdpa"]
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    module = nn.Module()
    module.layer_idx = 0
    layout = {KEYWORD: Packing.of([(5, [3, 1])], "cpu")}
    shown = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    by_place, _ = attention(module, query, key, value, shown, **layout)
    by_name, _ = attention(module, query, key, value, attention_mask=shown, **layout)
    assert torch.equal(by_place, by_name)
    for mask in ((torch.zeros(1, 2, 9, 9),), ()):
        named = {} if mask else {"attention_mask": torch.zeros(1, 2, 9, 9)}
        with pytest.raises(NotImplementedError, match="masks of their own"):
            attention(module, query, key, value, *mask, **named, **layout)
