"""Attention of packed rows against masked attention over all of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from faulty_kernels import break_kernels
from rollouts import rollout_of, visible
from tiny import lora_model, tiny_model, with_autocast
from torch import nn
from transformers import AttentionInterface

from trl.models import packed_attention as shared_attention
from trl.models.layout_check import precisions_to_check
from trl.models.packed_attention import (
    KEYWORD,
    AttentionOptions,
    Decoding,
    checked_kernels,
    install,
    packed_attention,
)
from trl.models.packed_layout import packed_layout
from trl.models.packed_row import Packing, PrefixCache, Tail, Window
from trl.models.scorer import Scorer
from trl.ops.attention_kernels import Heads, Tiles, choose_kernel
from trl.types import Rows

CPU = torch.device("cpu")
SCALE = 0.3
RULES = AttentionOptions(0, SCALE)
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
    found = packed_attention(tensors[0], (tensors[1], tensors[2]), packing, RULES)
    assert found.shape == expected.shape and found.dtype == dtype
    assert error(found, expected) < bound
    upstream = torch.linspace(-1, 1, expected.numel()).double().view(expected.shape)
    wanted = torch.autograd.grad(expected, exact, upstream)
    got = torch.autograd.grad(found, tensors, upstream.to(dtype))
    assert all(error(one, other) < bound for one, other in zip(got, wanted, strict=True))


# --- Windows, sinks, bounded logits, values of another size ---

LONG = GROUPS | {
    "prefix longer than the window": [(70, [20, 3, 40, 1]), (9, [2, 30])],
    "prefix shorter than the window": [(5, [40, 3, 9]), (6, [12])],
    "documents": [(0, [5, 1]), (0, [40])],
}
WINDOWS = [Window(2), Window(7), Window(16), Window(33), Window(4, True), Window(16, True)]


def explicit(query, key, value, mask, cap=None, sink=None):
    """Attention with all logits."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * SCALE
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    logits = logits.masked_fill(~mask, -torch.inf)
    if sink is None:
        return logits.softmax(-1) @ value
    column = sink[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ value


def windowed(groups, window):
    """Which tokens see which, with positions counted token by token."""
    prefixes = [range(prefix) for prefix, _ in groups]
    tails = [range(prefix, prefix + n) for prefix, tails in groups for n in tails]
    position = torch.tensor([i for run in prefixes + tails for i in run])
    if window.is_chunked:
        near = position[:, None] // window.size == position // window.size
    else:
        near = position[:, None] - position < window.size
    return mask_of(groups) & near


def compare(groups, rules, mask, value_size=8, sink=None, dtype=torch.float64):
    """The largest error of output and gradients."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, heads, len(mask), size, generator=generator, dtype=torch.float64)
        for heads, size in ((4, 8), (2, 8), (2, value_size))
    ]
    tensors += [] if sink is None else [sink]
    exact, ours = ([x.to(t).requires_grad_() for x in tensors] for t in (torch.float64, dtype))
    expected = explicit(*exact[:3], mask, rules.softcap, *exact[3:])
    packing = Packing.of(groups, "cpu")
    rules = replace(rules, sink=ours[3] if ours[3:] else None)
    found = packed_attention(ours[0], (ours[1], ours[2]), packing, rules)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream)]
    got = [found, *torch.autograd.grad(found, ours, upstream.to(dtype))]
    return max(error(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("kind", LONG)
def test_windows(kind, window):
    mask = windowed(LONG[kind], window)
    rules = AttentionOptions(0, SCALE, window)
    assert compare(LONG[kind], rules, mask) < 1e-12
    assert compare(LONG[kind], rules, mask, dtype=torch.float32) < 1e-5


@pytest.mark.parametrize("wrong", [Window(15), Window(17), Window(16, True), None], ids=str)
def test_a_wrong_window_is_seen(wrong):
    groups = LONG["prefix longer than the window"]
    assert compare(groups, AttentionOptions(0, SCALE, wrong), windowed(groups, Window(16))) > 1e-2


@pytest.mark.parametrize("kind", ["no tails", "prefix longer than the window", "documents"])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("size", [5, 8, 12])
def test_sinks_caps_and_values_of_another_size(monkeypatch, kind, cap, size):
    monkeypatch.setattr(Tiles, "SIZE", 16)
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64)
    for window in (None, Window(16)):
        mask = mask_of(LONG[kind]) if window is None else windowed(LONG[kind], window)
        assert (
            compare(LONG[kind], AttentionOptions(0, SCALE, window, cap), mask, size, sink) < 1e-12
        )


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
        packed_attention(tensors[0], (tensors[1], tensors[2]), Packing.of(groups, "cpu"), RULES),
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
    found = packed_attention(tensors[0], (tensors[1], tensors[2]), packing, RULES)
    expected = masked(*tensors, mask)
    assert error(found, expected) < 1e-12
    upstream = torch.randn(1, len(mask), 4, 8, dtype=torch.float64).transpose(1, 2)
    got = torch.autograd.grad(found, tensors, upstream)
    wanted = torch.autograd.grad(expected, tensors, upstream)
    assert all(error(one, other) < 1e-12 for one, other in zip(got, wanted, strict=True))


def test_gradients_of_cached_prefixes_hold_no_more_than_the_prefixes():
    cache, sizes = PrefixCache(), []
    prefix = [torch.randn(1, 2, 6, 8, requires_grad=True) * 1.0 for _ in range(2)]
    for part in prefix:
        part.register_hook(lambda grad: sizes.append(grad.untyped_storage().nbytes()))
    cache[0] = tuple(prefix)
    tails = [Tail(slice(0, 6), 6, 46), Tail(slice(0, 6), 46, 96)]
    _, layout = Packing.of_tails(tails, cache, CPU)
    query, *own = (torch.randn(1, heads, 90, 8) for heads in (4, 2, 2))
    packed_attention(query, tuple(own), layout, RULES).sum().backward()
    assert sizes == [part.nbytes for part in prefix]


@pytest.mark.parametrize("kind", GROUPS)
def test_the_mask_a_packing_stands_for(kind):
    groups = GROUPS[kind]
    expected = mask_of(groups)
    assert torch.equal(visible(Packing.of(groups, "cpu"), len(expected)), expected)


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
    decoding = Decoding(groups, dict(enumerate(prefixes)))
    for layer in range(2):
        found = decoding.attend(query, new, AttentionOptions(layer, SCALE))
        for row in range(6):
            key, value = prefixes[layer][next(i for i, g in enumerate(groups) if row < g.stop)]
            keys = torch.cat([key, new[0][row : row + 1]], 2)
            values = torch.cat([value, new[1][row : row + 1]], 2)
            expected = masked(query[row : row + 1], keys, values, None)
            assert error(found[row : row + 1], expected) < 1e-12


@pytest.mark.parametrize("own", [1, 4, 5, 6])
@pytest.mark.parametrize("sink", [None, torch.linspace(-1, 2, 4, dtype=torch.float64)])
def test_decoding_within_a_window(own, sink):
    """Of five tokens; prefixes hold no more than the first new token sees of them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    prefixes = [(draw(1, 2, n, 8), draw(1, 2, n, 6)) for n in (2, 4)]
    decoding = Decoding((slice(0, 1), slice(1, 3)), {0: prefixes})
    query, key, value = draw(3, 4, 1, 8), draw(3, 2, own, 8), draw(3, 2, own, 6)
    held = slice(max(0, own - 5), own)
    rules = AttentionOptions(0, SCALE, Window(5), sink=sink)
    mine = key[:, :, held], value[:, :, held]
    found = decoding.attend(query, mine, rules)
    for row, prefix in enumerate((prefixes[0], prefixes[1], prefixes[1])):
        keys, values = (
            torch.cat([before, new[row : row + 1]], 2)[:, :, -5:]
            for before, new in zip(prefix, (key, value), strict=True)
        )
        mask = torch.ones(1, keys.shape[2], dtype=torch.bool)
        expected = explicit(query[row : row + 1], keys, values, mask, sink=sink)
        assert error(found[row : row + 1], expected) < 1e-12


# --- Installing ---


@pytest.fixture
def implementation():
    """An attention of its own, which notes what it was called with, and a model that has it."""
    calls = []

    def attention(module, query, key, value, mask, **kwargs):
        calls.append((module, query, key, value, mask, kwargs))
        return query * 2, "weights"

    AttentionInterface.register("noted", attention)
    model = tiny_model()
    model.config._attn_implementation = "noted"
    yield calls, attention, model
    del AttentionInterface._global_mapping["noted"]


def attend(name, *args, **kwargs):
    return AttentionInterface._global_mapping[name](*args, **kwargs)


def test_without_the_keyword_nothing_changes(implementation):
    calls, original, model = implementation
    install(model)
    query = torch.ones(1, 2, 3, 4)
    mask = object()
    found = attend("noted", "module", query, query, query, mask, scaling=0.5, dropout=0.1)
    assert torch.equal(found[0], query * 2) and found[1] == "weights"
    assert len(calls) == 1 and calls[0][1] is query
    assert calls[0][4] is mask and calls[0][5] == {"scaling": 0.5, "dropout": 0.1}
    assert AttentionInterface._global_mapping["noted"].trl_original is original


def test_installing_twice_wraps_once(implementation):
    _, original, model = implementation
    install(model)
    once = AttentionInterface._global_mapping["noted"]
    install(model)
    assert AttentionInterface._global_mapping["noted"] is once
    assert once.trl_original is original


def test_sdpa_gives_the_same_bits_with_and_without():
    install(tiny_model())
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
    calls, _, model = implementation
    install(model)
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


def test_models_may_name_the_mask():
    """Doge hands it on by name, where others hand it on by place."""
    install(tiny_model())
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
    install(tiny_model())
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


# --- Kernels are checked before they are relied on ---

HALF = torch.bfloat16


def packed(model):
    """Run a model on a prompt with two completions."""
    layout = packed_layout(batch(), CPU)
    return model.base_model(**layout.inputs, use_cache=False)[0]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_layers_work_on_is_checked(monkeypatch, autocast):
    model, checked = tiny_model("qwen3", num_key_value_heads=1, head_dim=16), []
    monkeypatch.setattr(shared_attention, "check_kernel", lambda *given: checked.append(given))
    for _ in range(2):
        with torch.autocast("cpu", autocast, autocast is not None), checked_kernels(model):
            packed(model)
    kind = Heads(CPU, autocast or torch.float32, 4, 1, 16)
    assert checked == 2 * [(choose_kernel(torch.empty(0, 16)), kind)], "once for all layers"


def test_layers_that_do_not_ask_for_attention_are_an_error():
    packed(tiny_model())
    with pytest.raises(RuntimeError, match="did not call"), checked_kernels(tiny_model()):
        pass


def warnings(log):
    return [r.getMessage() for r in log.records if "shared_prefix" in r.getMessage()]


def batch() -> Rows:
    prompt = [20, 21, 22]
    return rollout_of([(prompt, [30, 31, 32, 33]), (prompt, [40, 41, 42, 43])])


def scorer(**options) -> Scorer:
    return Scorer(pad_id=0, temperature=1.0, device=CPU, **options)


def layouts(model):
    """Whether each forward of the decoder is packed, and the precision of its autocast."""
    calls = []

    def note(module, args, kwargs):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        calls.append((KEYWORD in kwargs, dtype))

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


@pytest.mark.parametrize(
    ("weights", "autocast", "tried"),
    [
        (torch.float32, None, (None,)),
        (torch.bfloat16, None, (None,)),
        (torch.float32, torch.bfloat16, (None, torch.bfloat16)),
        (torch.bfloat16, torch.bfloat16, (torch.bfloat16,)),
        (torch.bfloat16, torch.float16, (torch.float16,)),
    ],
)
def test_what_is_tried(weights, autocast, tried):
    assert precisions_to_check(tiny_model().to(weights), autocast) == tried


def test_full_precision_is_tried_first_and_then_what_trains(monkeypatch):
    """Two rows alone and the same packed, each time; kernels with the heads of the model."""
    checked = []
    monkeypatch.setattr(shared_attention, "check_kernel", lambda _, heads: checked.append(heads))
    model = with_autocast(tiny_model())
    calls = layouts(model)
    scorer()(model, batch())
    trial = [(False, None)] * 2 + [(True, None)] + [(False, HALF)] * 2 + [(True, HALF)]
    assert calls[-7:] == [*trial, (True, HALF)]
    assert checked == [Heads(CPU, dtype, 4, 2, 8) for dtype in (torch.float32, HALF)]


@pytest.mark.parametrize(
    ("fault", "words"),
    [("value", "is off by 0.03"), ("causality", "is off by"), ("error", "no kernel image")],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_kernel_at_fault_leads_to_plain_rows(log, monkeypatch, fault, words, dtype):
    """One warning that says why, and the results of plain rows."""
    model = tiny_model() if dtype == torch.float32 else with_autocast(tiny_model())
    expected = scorer(shared_prefix=False)(model, batch()).logps
    break_kernels(monkeypatch, fault, dtype)
    score = scorer()
    for _ in range(2):
        assert torch.equal(score(model, batch()).logps, expected)
    assert not score.check.enabled
    assert len(warnings(log)) == 1
    assert "a check of log-probabilities failed" in warnings(log)[0] and words in warnings(log)[0]


def test_ranks_that_decide_together_try_it_too(log, monkeypatch):
    """Outside of any autocast, as at the start of a round."""
    model, score = with_autocast(lora_model()), scorer()
    break_kernels(monkeypatch, "key", HALF)
    score.agree(model, batch(), float)
    assert not score.check.enabled and "in bfloat16" in warnings(log)[0]


def test_a_layout_that_is_lost_shows_in_full_precision(log):
    """In half precision rounding may hide it."""
    model = with_autocast(tiny_model())
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            {k: None if k == "attention_mask" else v for k, v in kwargs.items() if k != KEYWORD},
        ),
        with_kwargs=True,
    )
    expected = scorer(shared_prefix=False)(model, batch()).logps
    assert torch.equal(scorer()(model, batch()).logps, expected)
    assert len(warnings(log)) == 1 and "differed by" in warnings(log)[0]
