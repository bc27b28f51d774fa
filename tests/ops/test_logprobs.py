import math

import pytest
import torch

from trl.ops import logprobs
from trl.ops.logprobs import token_scores

VOCABULARY = 11


def full_log_probs(logits, ids, temperature):
    every = (logits / temperature).log_softmax(-1)
    return torch.take_along_dim(every, ids[..., None], -1)[..., 0]


def full_entropy(logits, temperature):
    every = (logits / temperature).log_softmax(-1)
    return -(every.exp() * every).sum(-1)


def random_logits(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    return logits.to(dtype), ids


def gradient(function, logits):
    logits = logits.detach().clone().requires_grad_()
    found = function(logits)
    weights = torch.arange(1, found.numel() + 1, dtype=found.dtype).view(found.shape)
    (found * weights).sum().backward()
    return logits.grad


@pytest.mark.parametrize("elements", [1, VOCABULARY, 3 * VOCABULARY, 2**20])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_value_and_gradient_equal_full_log_softmax(monkeypatch, shape, temperature, elements):
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", elements)
    logits, ids = random_logits(*shape)
    pairs = [
        (
            lambda x: token_scores(x, ids, temperature)[0],
            lambda x: full_log_probs(x, ids, temperature),
        ),
        (
            lambda x: token_scores(x, ids, temperature, with_entropy=True)[1],
            lambda x: full_entropy(x, temperature),
        ),
        (
            lambda x: sum(token_scores(x, ids, temperature, with_entropy=True)[:2]),
            lambda x: full_log_probs(x, ids, temperature) + full_entropy(x, temperature),
        ),
    ]
    for ours, full in pairs:
        assert ours(logits).shape == shape
        torch.testing.assert_close(ours(logits), full(logits), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            gradient(ours, logits), gradient(full, logits), rtol=1e-11, atol=1e-12
        )


def test_a_slice_of_positions_gets_its_gradient_in_place(monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", 2 * VOCABULARY)
    logits, ids = random_logits(3, 6)
    ours = gradient(lambda x: token_scores(x[:, 1:-1], ids[:, 2:], 0.9)[0], logits)
    full = gradient(lambda x: full_log_probs(x[:, 1:-1], ids[:, 2:], 0.9), logits)
    torch.testing.assert_close(ours, full, rtol=1e-11, atol=1e-12)
    assert not ours[:, [0, -1]].any()


def test_gradients_by_finite_differences():
    logits, ids = random_logits(2, 2)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: token_scores(x, ids, 0.7, with_entropy=True)[:2], (logits,)
    )


def test_only_one_of_two_results_may_be_used():
    logits, ids = random_logits(4)
    alone = gradient(lambda x: token_scores(x, ids)[0], logits)
    unused = gradient(lambda x: token_scores(x, ids, with_entropy=True)[0], logits)
    assert torch.equal(alone, unused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_give_float32_statistics(dtype):
    logits, ids = random_logits(3, 4, dtype=dtype)
    logps, entropies, _ = token_scores(logits, ids, 0.8, with_entropy=True)
    assert logps.dtype is entropies.dtype is torch.float32
    exact = logits.double()
    torch.testing.assert_close(logps, full_log_probs(exact, ids, 0.8).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies, full_entropy(exact, 0.8).float(), rtol=1e-6, atol=1e-6)
    grad = gradient(lambda x: token_scores(x, ids, 0.8)[0], logits)
    assert grad.dtype is dtype
    expected = gradient(lambda x: full_log_probs(x, ids, 0.8), exact)
    assert (grad.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


def test_hand_computed_values():
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    logps, entropies, _ = token_scores(logits, torch.tensor([1]), with_entropy=True)
    assert logps.item() == pytest.approx(math.log(0.75), abs=1e-15)
    assert entropies.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-15)


def test_hits_are_the_largest_logits(monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", 2 * VOCABULARY)
    logits, ids = random_logits(3, 6)
    ids[:, ::2] = logits.argmax(-1)[:, ::2]
    hits = token_scores(logits, ids, 0.7, with_entropy=True)[2]
    assert torch.equal(hits, logits.argmax(-1) == ids) and hits.any() and not hits.all()


def test_large_logits_keep_their_digits():
    logits = torch.tensor([[10000.0, 10000.0 - 8.0, -10000.0]])
    expected = -math.log1p(math.exp(-8.0))
    assert token_scores(logits, torch.tensor([0]))[0].item() == pytest.approx(expected, abs=1e-7)


def test_impossible_tokens_add_nothing_to_the_entropy():
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    _, entropy, _ = token_scores(logits, torch.tensor([0]), with_entropy=True)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-12)
    entropy.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-12)


def test_no_positions():
    logits = torch.zeros(2, 0, VOCABULARY, requires_grad=True)
    found = token_scores(logits, torch.zeros(2, 0, dtype=torch.long))[0]
    assert found.shape == (2, 0)
    found.sum().backward()
    assert logits.grad.shape == logits.shape


def test_the_backward_pass_keeps_no_second_copy_of_the_logits():
    kept = []
    logits, ids = random_logits(4, 5, dtype=torch.bfloat16)
    logits.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_scores(logits, ids, with_entropy=True)
    storages = {x.untyped_storage().data_ptr() for x in kept if x.shape[-1] == VOCABULARY}
    assert storages == {logits.untyped_storage().data_ptr()}


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature):
    logits, ids = random_logits(2)
    with pytest.raises(ValueError, match="temperature must be greater than 0"):
        token_scores(logits, ids, temperature)[0]
