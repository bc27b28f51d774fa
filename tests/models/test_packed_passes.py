"""A packed forward in passes: the same numbers, fewer tokens at once."""

import gc

import pytest
import torch
from tensor_bytes import TensorBytes
from tiny import tiny_model

from trl.models import packed_passes as passes
from trl.models.packed_layout import packed_layout
from trl.models.scorer import Scorer
from trl.types import Rollout

CPU = torch.device("cpu")
PROMPTS = [[8, 9, 10]] * 3 + [[11, 12, 13, 14, 15]] * 2 + [[16, 17]]
COMPLETIONS = [[20, 21, 1], [22, 23, 24, 25, 1], [26], [27, 28, 1], [29, 30, 31, 1], [32, 33, 34]]
PREFIX_TOKENS = 3 + 5 + 2 + 2  # the single completion goes on behind its prompt


def rollout(prompts=PROMPTS, completions=COMPLETIONS) -> Rollout:
    lengths = torch.tensor([len(ids) for ids in completions])
    return Rollout(
        prompt_ids=prompts,
        completion_ids=completions,
        row_ids=list(range(len(prompts))),
        loss_mask=torch.arange(int(lengths.max())) < lengths[:, None],
        num_loss_tokens=lengths.sum(),
        num_loss_rows=torch.tensor(len(prompts)),
    )


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
    weights = torch.linspace(-1, 1, batch.loss_mask.numel()).view(batch.loss_mask.shape)
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
    assert passes.gradient_bytes(model) == sum(p.nbytes for p in model.parameters())
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
