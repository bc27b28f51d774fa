"""Layouts against a slow construction of what each completion token is predicted from."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import token_mask, visible
from tensor_bytes import TensorBytes
from tiny import tiny_model

from trl.models import packed_layout as passes
from trl.models.packed_attention import KEYWORD
from trl.models.packed_layout import packed_layout, plain_layout
from trl.models.scorer import Scorer
from trl.types import Media, Prefix, Rows

CPU = torch.device("cpu")
PAD = 99


def predicted(rows, width):
    """Which completion tokens exist and have something before them."""
    marks = [
        [place < len(ids) and len(prompt) + place > 0 for place in range(width)]
        for prompt, ids in rows
    ]
    return torch.tensor(marks, dtype=torch.bool).view(len(rows), width)


# Few different tokens, so that completions begin alike, and prompts recur.
tokens = st.integers(1, 3)
completions = st.lists(st.lists(tokens, max_size=6), min_size=1, max_size=5)
prompts = st.lists(tokens, max_size=5)  # an empty one makes documents
rounds = st.lists(st.tuples(prompts, completions), min_size=1, max_size=4)


def flat(groups):
    return [(prompt, completion) for prompt, group in groups for completion in group]


def slots_of(layout):
    """Which prediction each completion token (B, C) is, and which of them exist."""
    numbers = torch.arange(len(layout.targets))
    return layout.scatter(numbers), layout.scatter(torch.ones_like(numbers)).bool()


def seen_by(layout, mask):
    """For each place of the row: the tokens it sees, itself included, in order of position."""
    ids, positions = layout.inputs["input_ids"][0], layout.inputs["position_ids"][0]
    found = []
    for place in range(len(ids)):
        context = sorted(
            (int(positions[other]), int(ids[other]))
            for other in range(len(ids))
            if mask[place, other]
        )
        assert [position for position, _ in context] == list(range(len(context))), "no gap"
        found.append([token for _, token in context])
    return found


@settings(max_examples=150, deadline=None)
@given(rounds)
def test_packed_tokens_are_predicted_from_exactly_what_stands_before(groups):
    rows = flat(groups)
    layout = packed_layout(Rows.of(rows), CPU)
    ids = layout.inputs["input_ids"]
    context = seen_by(layout, visible(layout.inputs[KEYWORD], ids.shape[1]))
    slots, exists = slots_of(layout)
    assert torch.equal(exists, predicted(rows, layout.shape[1]))
    for row, (prompt, completion) in enumerate(rows):
        for place, token in enumerate(completion):
            if not exists[row, place]:
                continue
            slot = slots[row, place]
            assert int(layout.targets[slot]) == token
            assert context[layout.sources[slot]] == [*prompt, *completion[:place]]


@settings(max_examples=150, deadline=None)
@given(rounds)
def test_packed_rows_hold_no_token_twice(groups):
    """A run of equal prompts: the prompt and the common beginning once, and no last tokens."""
    rows, count, start = flat(groups), 0, 0
    while start < len(rows):
        prompt, stop = rows[start][0], start
        while stop < len(rows) and rows[stop][0] == prompt:
            stop += 1
        used = [completion[:-1] for _, completion in rows[start:stop] if completion]
        shared = 0
        while (
            prompt
            and used
            and all(len(ids) > shared and ids[shared] == used[0][shared] for ids in used)
        ):
            shared += 1
        count += len(prompt) + shared + sum(len(ids) - shared for ids in used)
        start = stop
    layout = packed_layout(Rows.of(rows), CPU)
    assert layout.inputs["input_ids"].shape == (1, max(1, count)), "one token at least"
    assert layout.inputs["attention_mask"].shape == (1, 1, 1, 1), "handed on as it is"
    assert KEYWORD in layout.inputs


@settings(max_examples=150, deadline=None)
@given(rounds, st.booleans())
def test_the_last_token_of_each_row(groups, packed):
    """With all that stands before it; rows without tokens have none, and count as 0."""
    rows = flat(groups)
    if packed:
        layout = packed_layout(Rows.of(rows), CPU, with_ends=True)
        context = seen_by(
            layout, visible(layout.inputs[KEYWORD], layout.inputs["input_ids"].numel())
        )
    else:
        layout = plain_layout(Rows.of(rows), PAD, CPU)
        ids = layout.inputs["input_ids"]
        mask = layout.inputs.get("attention_mask", torch.ones_like(ids)).bool()
        context = [
            row[: place + 1][marks[: place + 1]].tolist()
            for row, marks in zip(ids, mask, strict=True)
            for place in range(len(row))
        ]
    real = [row for row, (prompt, ids) in enumerate(rows) if prompt + ids]
    assert layout.rows.tolist() == real
    for row, end in zip(real, layout.ends.tolist(), strict=True):
        assert context[end] == [*rows[row][0], *rows[row][1]]
    found = layout.by_row(torch.ones(len(real)))
    assert found.nonzero()[:, 0].tolist() == real and found.shape == (len(rows),)


@settings(max_examples=100, deadline=None)
@given(rounds, st.sampled_from([None, 4, 7]))
def test_plain_rows(groups, multiple):
    rows = flat(groups)
    layout = plain_layout(Rows.of(rows), PAD, CPU, multiple)
    ids = layout.inputs["input_ids"]
    mask = layout.inputs.get("attention_mask", torch.ones_like(ids))
    width = max(1, max(len(prompt + completion) for prompt, completion in rows))
    if multiple:
        width = -(-width // multiple) * multiple
    assert ids.shape == (len(rows), width)
    slots, exists = slots_of(layout)
    assert torch.equal(exists, predicted(rows, layout.shape[1]))
    assert KEYWORD not in layout.inputs
    assert ("attention_mask" in layout.inputs) == bool((mask == 0).any())
    for row, (prompt, completion) in enumerate(rows):
        right = width - len(prompt) - len(completion)
        assert ids[row].tolist() == [*prompt, *completion] + [PAD] * right
        real = len(prompt) + len(completion)
        assert mask[row].tolist() == [1] * real + [0] * right
        positions = layout.inputs["position_ids"][row][:real]
        assert positions.tolist() == list(range(real))
        for place, token in enumerate(completion):
            if not exists[row, place]:
                continue
            slot = slots[row, place]
            assert layout.targets[slot] == token
            source = int(layout.sources[slot])
            assert source // ids.shape[1] == row
            assert source % ids.shape[1] == len(prompt) - 1 + place
            assert source % ids.shape[1] >= width - layout.logits_to_keep


def test_an_example():
    """One prompt (5, 6); completions 1 2 3 4, 1 2 7, empty, 1 2 3."""
    rows = [([5, 6], ids) for ids in ([1, 2, 3, 4], [1, 2, 7], [], [1, 2, 3])]
    layout = packed_layout(Rows.of(rows), CPU)
    assert layout.inputs["input_ids"].tolist() == [[5, 6, 1, 2, 3]]
    assert layout.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    packing = layout.inputs[KEYWORD]
    assert [(g.prefix, g.all_tails) for g in packing.groups] == [(slice(0, 4), slice(4, 5))]
    assert layout.sources.tolist() == [1, 2, 3, 3, 4]
    assert layout.targets.tolist() == [1, 2, 3, 7, 4]
    assert layout.predictions.tolist() == [0, 1, 2, 4, 0, 1, 3, 0, 1, 2]
    assert layout.cells.tolist() == [0, 1, 2, 3, 4, 5, 6, 12, 13, 14]
    values = torch.arange(1.0, 6.0)
    assert layout.scatter(values).tolist() == [
        [1, 2, 3, 5],
        [1, 2, 4, 0],
        [0, 0, 0, 0],
        [1, 2, 3, 0],
    ]


def test_prefixes_stand_before_all_tails():
    rows = [([5], [1, 2]), ([5], [3, 4]), ([6, 7], [1, 2]), ([6, 7], [8, 9])]
    layout = packed_layout(Rows.of(rows), CPU)
    assert layout.inputs["input_ids"].tolist() == [[5, 6, 7, 1, 3, 1, 8]]
    assert layout.inputs["position_ids"].tolist() == [[0, 0, 1, 1, 1, 2, 2]]


def test_equal_prompts_that_are_apart_are_two_groups():
    rows = [([5], [1, 2]), ([6], [1, 2]), ([5], [1, 3])]
    layout = packed_layout(Rows.of(rows), CPU)
    assert len(layout.inputs[KEYWORD].groups) == 3


def test_nothing_but_empty_completions():
    layout = packed_layout(Rows.of([([5, 6], []), ([7], [])]), CPU)
    assert layout.inputs["input_ids"].tolist() == [[5, 6, 7]]
    assert layout.scatter(torch.ones(1)).shape == (2, 0)


def test_values_beyond_the_end_are_zero_and_take_no_gradient():
    """NaN among the values reaches its own tokens alone."""
    layout = packed_layout(Rows.of([([5], [1, 2]), ([5], [3])]), CPU)
    values = torch.tensor([torch.nan, 2.0, 3.0], requires_grad=True)
    found = layout.scatter(values)
    assert found[0].isnan().tolist() == [True, False]
    assert found[1].tolist() == [2.0, 0.0]
    found[1].sum().backward()
    assert values.grad.tolist() == [0.0, 1.0, 0.0]


# --- Passes: the same numbers, fewer tokens at once ---

PROMPTS = [[8, 9, 10]] * 3 + [[11, 12, 13, 14, 15]] * 2 + [[16, 17]]
COMPLETIONS = [[20, 21, 1], [22, 23, 24, 25, 1], [26], [27, 28, 1], [29, 30, 31, 1], [32, 33, 34]]
PREFIX_TOKENS = 3 + 5 + 2 + 2  # the single completion goes on behind its prompt


def rollout(prompts=PROMPTS, completions=COMPLETIONS) -> Rows:
    return Rows.of(list(zip(prompts, completions, strict=True)))


def weights_of(batch: Rows) -> torch.Tensor:
    """A weight for each token, all different."""
    shape = token_mask(batch).shape
    return torch.linspace(-1, 1, shape.numel()).view(shape)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(passes, "SHORTEST_PASS", 4)
    monkeypatch.setattr(passes, "SHORTEST_TAIL_PASS", 4)


def checkpointed(kind="llama", reentrant=False, **changes):
    model = tiny_model(kind, **changes).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def widths(model) -> list[int]:
    """Tokens of each forward of the decoder, from now on."""
    seen = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return seen


def scorer(**options) -> Scorer:
    return Scorer(pad_id=0, temperature=0.8, device=CPU, **options)


def gradient(model, batch, weights, **options) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logps = scorer(**options)(model, batch).logps
    (logps * weights).sum().backward()
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_passes_give_the_gradient_of_one_forward(kind, short):
    batch = rollout()
    weights = weights_of(batch)
    whole = gradient(tiny_model(kind).train(), batch, weights)
    cut = gradient(checkpointed(kind), batch, weights)
    assert (cut[0] - whole[0]).abs().max() < 2e-6
    assert (cut[1] - whole[1]).norm() / whole[1].norm() < 5e-6


def test_half_precision_is_as_good_as_single_rows(short):
    """Gradients of a prefix are summed in bfloat16 over the passes: sixteen of them here.

    The bound is that of the certificate for half precision.
    """
    generator = torch.Generator().manual_seed(8)
    prompt, *completions = torch.randint(8, 90, (17, 32), generator=generator).tolist()
    batch = rollout([prompt] * 16, [ids[:12] for ids in completions])
    weights = torch.randn(16, 1, generator=generator).expand(16, 12)
    model = checkpointed(initializer_range=0.1)
    exact = gradient(model, batch, weights)[1]
    with torch.autocast("cpu", torch.bfloat16):
        seen = widths(model)
        found = gradient(model, batch, weights)[1]
        rows = [
            gradient(model, batch.select([row]), weights[[row]], shared_prefix=False)[1]
            for row in range(16)
        ]
    assert [width for width in seen if width == 11] == [11] * 16
    assert (found - exact).norm() < 1.3 * (sum(rows) - exact).norm()


def test_no_pass_has_more_tokens_than_the_longest(short):
    model, batch, score = checkpointed(), rollout(), scorer()
    score(model, batch)  # with the trial
    seen = widths(model)
    score(model, batch)
    tails = [2, 4, 0, 2, 3]  # all tokens of a completion but its last
    assert seen == [PREFIX_TOKENS, 6, 5]
    assert sum(seen) == PREFIX_TOKENS + sum(tails)
    with torch.no_grad():
        score(model.eval(), batch)
    assert seen[3:] == seen[:3]


@pytest.mark.parametrize("case", ["kept activations", "reentrant", "short", "no tails"])
def test_one_pass_where_more_save_nothing(case, monkeypatch):
    monkeypatch.setattr(passes, "SHORTEST_PASS", 10_000 if case == "short" else 4)
    model = tiny_model().train() if case == "kept activations" else checkpointed()
    if case == "reentrant":
        model = checkpointed(reentrant=True)
    batch = rollout([[8, 9, 10, 11]], [[20, 21, 1]]) if case == "no tails" else rollout()
    assert not passes.wants_passes(model, packed_layout(batch, CPU))


def test_inference_is_cut_without_checkpointing(short):
    layout = packed_layout(rollout(), CPU)
    with torch.no_grad():
        assert passes.wants_passes(tiny_model().eval(), layout)


def test_a_step_leaves_nothing_behind(short):
    model, batch, score = checkpointed(), rollout(), scorer()

    def step(with_backward=True):
        model.zero_grad()
        loss = score(model, batch).logps.sum()
        if with_backward:
            loss.backward()
        del loss
        score.forget()
        gc.collect()

    step()
    with TensorBytes() as counter:
        step()
        held = counter.live
        step()
        assert counter.live == held
        step(with_backward=False)
        step(with_backward=False)
        step()
        assert counter.live == held


def test_gradients_that_are_there_weigh_against_passes(short):
    model = checkpointed()
    layout = packed_layout(rollout(), CPU)
    assert passes.gradient_bytes(model) == 0
    assert passes.wants_passes(model, layout)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # Gradients of embedding and head are added in place, however many passes there are.
    ends = model.model.embed_tokens.weight.nbytes + model.lm_head.weight.nbytes
    assert passes.gradient_bytes(model) == sum(p.nbytes for p in model.parameters()) - ends
    assert not passes.wants_passes(model, layout)


@pytest.mark.parametrize(
    ("lengths", "prefix", "counts"),
    [
        ([], 10, []),
        ([3, 3, 3], 2, [1, 1, 1]),
        ([2, 2, 1, 4, 9], 2, [2, 1, 1, 1]),
        ([2, 2, 1, 4, 9], 10, [3, 1, 1]),
    ],
)
def test_tails_of_a_pass(short, lengths, prefix, counts):
    assert passes.tails_of_passes(lengths, prefix) == counts


def test_rows_with_other_media_do_not_share_a_prefix():
    prefixes = [Prefix([5, 6, 7], (Media(content, {}),)) for content in (b"cat", b"cat", b"dog")]
    rows = Rows(prefixes=prefixes, completion_ids=[[1, 2], [3, 4], [1, 2]], row_ids=range(3))
    packing = packed_layout(rows, torch.device("cpu")).inputs[KEYWORD]
    assert [group.prefix.stop - group.prefix.start for group in packing.groups] == [3, 4]
    assert [len(group.tails) for group in packing.groups] == [2, 0]
