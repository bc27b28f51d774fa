"""The bounded head against full logits: values, gradients, rounding, and what it allocates."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl.ops import linear_logprobs
from trl.ops.linear_logprobs import LogitTransform, Tiling, default_chunk, linear_log_probs

HIDDEN, VOCABULARY = 12, 203
CHUNKS = [1, 64, 100, 1000, 5000, 10**9, None]
TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.6),
    LogitTransform(scale=0.25),
    LogitTransform(softcap=2.0),
    LogitTransform(temperature=1.7, scale=3.0, softcap=4.0),
]


def inputs(tokens=37, bias=None, seed=0):
    """Hidden states, weight, ids and bias ("plain", "inf" or None); logits of a size of about 3."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    hidden, weight, shift = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    if bias == "inf":
        # Whole tiles of the vocabulary, the first one among them, and none of the ids.
        shift[:130] = shift[150] = shift[200:] = -torch.inf
        ids = 130 + ids % 20
    shift = shift.requires_grad_() if bias else None
    return hidden.requires_grad_(), weight.requires_grad_(), ids, shift


def definition(hidden, weight, ids, bias, transform):
    """From all logits; tokens that are impossible take no part, but for what a soft cap makes."""
    kept = torch.arange(len(weight))
    if bias is not None and transform.softcap is None:
        kept = kept[bias.isfinite()]
    logits = hidden @ weight[kept].T
    if bias is not None:
        logits = logits + bias[kept]
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    every = (logits / transform.temperature).log_softmax(-1)
    chosen = every[torch.arange(len(ids)), torch.searchsorted(kept, ids)]
    return chosen, -(every.exp() * every).sum(-1)


def gradients(value, tensors):
    """Gradients of the tensors that are there, in one vector."""
    present = [x for x in tensors if x is not None and x.requires_grad]
    found = torch.autograd.grad(value, present, retain_graph=True)
    return torch.cat([x.flatten() for x in found])


@pytest.mark.parametrize("bias", [None, "plain", "inf"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_and_gradients_are_those_of_full_logits(transform, bias):
    """Upstream gradients are large: nothing may depend on their size."""
    hidden, weight, ids, shift = inputs(bias=bias)
    tensors = (hidden, weight, shift)
    logps, entropies = definition(hidden, weight, ids, shift, transform)
    first, second = 50 * torch.linspace(-1, 1, 2 * len(ids)).double().view(2, -1)
    expected = [
        gradients((logps * first).sum(), tensors),
        gradients((entropies * second).sum(), tensors),
    ]
    for chunk in CHUNKS:
        call = (hidden, weight, ids, shift, Tiling(transform, chunk))
        alone, none, _ = linear_log_probs(*call)
        ours, spread, hits = linear_log_probs(*call, with_entropy=True)
        assert none is None and hits.dtype is torch.bool
        assert (alone - logps).abs().max() < 1e-10
        assert (ours - logps).abs().max() < 1e-10
        assert (spread - entropies).abs().max() < 1e-10
        found = [
            gradients((alone * first).sum(), tensors),
            gradients((ours * first).sum(), tensors),
            gradients((spread * second).sum(), tensors),
            gradients((ours * first + spread * second).sum(), tensors),
        ]
        wanted = [expected[0], *expected, sum(expected)]
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).norm() < 1e-10 * other.norm(), chunk


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17, 40])
def test_counts_of_tokens_around_a_tile(monkeypatch, tokens):
    monkeypatch.setattr(linear_logprobs, "TOKENS_IN_TILE", 8)
    hidden, weight, ids, _ = inputs(tokens)
    logps, entropies = definition(hidden, weight, ids, None, LogitTransform())
    expected = gradients((logps + entropies).sum(), (hidden, weight))
    for chunk in (64, 8 * 64, 8 * 100, 8 * VOCABULARY, 10**6):
        found = linear_log_probs(hidden, weight, ids, None, Tiling(chunk=chunk), True)
        assert (found[0] - logps).abs().max() < 1e-10
        got = gradients((found[0] + found[1]).sum(), (hidden, weight))
        assert (got - expected).norm() < 1e-10 * expected.norm()


def test_counts_of_tokens_around_the_real_tile():
    for tokens in (1023, 1024, 1025):
        hidden, weight, ids, _ = inputs(tokens)
        logps, _ = definition(hidden, weight, ids, None, LogitTransform())
        expected = gradients(logps.sum(), (hidden, weight))
        found, *_ = linear_log_probs(hidden, weight, ids, None, Tiling(chunk=2**16))
        assert (found - logps).abs().max() < 1e-10
        assert (gradients(found.sum(), (hidden, weight)) - expected).norm() < 1e-8


def test_no_tokens_at_all():
    """Weights have a gradient of zero then, as with full logits."""
    hidden, weight, ids, shift = inputs(0, bias="plain")
    found, entropies, _ = linear_log_probs(hidden, weight, ids, shift, with_entropy=True)
    assert found.shape == entropies.shape == (0,)
    (found.sum() + entropies.sum()).backward()
    assert weight.grad.eq(0).all() and shift.grad.eq(0).all() and hidden.grad.shape == (0, HIDDEN)


@pytest.mark.parametrize("frozen", ["weight", "hidden", "bias"])
def test_frozen_tensors_get_no_gradient(frozen):
    hidden, weight, ids, shift = inputs(bias="plain")
    tensors = {"hidden": hidden, "weight": weight, "bias": shift}
    logps, entropies = definition(hidden, weight, ids, shift, LogitTransform())
    tensors[frozen].requires_grad_(False)
    expected = gradients((logps + entropies).sum(), tensors.values())
    found = linear_log_probs(hidden, weight, ids, shift, Tiling(chunk=500), True)
    got = gradients((found[0] + found[1]).sum(), tensors.values())
    assert (got - expected).norm() < 1e-10 * expected.norm()


def test_every_gradient_is_right_numerically():
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (70, 4), (70,))
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    tiling = Tiling(LogitTransform(0.7, 1.3, 5.0), 64)

    def head(hidden, weight, bias):
        return linear_log_probs(hidden, weight, torch.tensor([0, 69, 64]), bias, tiling, True)[:2]

    assert torch.autograd.gradcheck(head, tensors)


def test_hits_are_the_largest_of_full_logits():
    hidden, weight, _, shift = inputs(40, bias="plain")
    top = (hidden @ weight.t() + shift).argmax(1)
    ids = torch.where(torch.arange(40) % 3 == 0, (top + 1) % len(weight), top)
    for chunk in CHUNKS:
        hits = linear_log_probs(hidden, weight, ids, shift, Tiling(chunk=chunk), True)[2]
        assert hits.tolist() == [row % 3 != 0 for row in range(40)]


def test_what_is_nan_stays_nan():
    hidden, weight, ids, _ = inputs(5)
    with torch.no_grad():
        hidden[2] = torch.nan
    logps, entropies, _ = linear_log_probs(hidden, weight, ids, None, Tiling(chunk=200), True)
    assert logps.isnan().tolist() == entropies.isnan().tolist() == [row == 2 for row in range(5)]


def test_an_impossible_token_has_probability_zero():
    hidden, weight, _, shift = inputs(2, bias="inf")
    found, *_ = linear_log_probs(hidden, weight, torch.tensor([0, 140]), shift, Tiling(chunk=64))
    assert found[0] == -torch.inf and found[1].isfinite()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="greater than 0"):
        LogitTransform(temperature=temperature)


@pytest.mark.parametrize("chunk", [0, -3])
def test_chunks_must_be_positive(chunk):
    hidden, weight, ids, _ = inputs(2)
    with pytest.raises(ValueError, match=f"at least 1, got {chunk}"):
        linear_log_probs(hidden, weight, ids, None, Tiling(chunk=chunk))


# --- Precision ---


def half_inputs(tokens, hidden_size=32, vocabulary=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator).bfloat16()
    weight = (torch.randn(vocabulary, hidden_size, generator=generator) / 4).bfloat16()
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), ids


def one_sided_inputs(tokens, first=1.0, seed=0, vocabulary=60):
    """Whatever is added up for an entry of the weight has one sign.

    Args:
        first: weight of the first token's log-probability, where that of the others is 1.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = (1 + 0.3 * torch.randn(tokens, 8, generator=generator)).bfloat16()
    weight = (torch.randn(vocabulary, 8, generator=generator) / 4).bfloat16()
    shares = torch.ones(tokens)
    shares[0] = first
    ids = torch.zeros(tokens, dtype=torch.long)
    return (hidden.requires_grad_(), weight.requires_grad_(), ids), shares / shares.sum()


def full_gradients(hidden, weight, ids, dtype, shares=None):
    """Gradients of the mean log-probability by full logits that are multiplied in a dtype."""
    parts = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    logits = (parts[0] @ parts[1].T).float()
    logps = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
    return [x.float() for x in torch.autograd.grad(mean(logps, shares), parts)]


def bounded_gradients(hidden, weight, ids, chunk, shares=None):
    logps, *_ = linear_log_probs(hidden, weight, ids, None, Tiling(chunk=chunk))
    return [x.float() for x in torch.autograd.grad(mean(logps, shares), (hidden, weight))]


def mean(logps, shares):
    return logps.mean() if shares is None else logps @ shares


@pytest.mark.parametrize(("chunk", "allowed"), [(None, 1.05), (40000, 1.2), (640, 1.4)])
def test_bfloat16_is_no_worse_than_full_logits(chunk, allowed):
    """Unless tiles are small: their products are rounded too, which a total in float32 averages."""
    errors = {"bounded": [], "full": []}
    for seed in range(4):
        call = half_inputs(400, seed=seed)
        exact = full_gradients(*call, torch.float32)
        for name, found in (
            ("bounded", bounded_gradients(*call, chunk)),
            ("full", full_gradients(*call, torch.bfloat16)),
        ):
            pairs = zip(found, exact, strict=True)
            errors[name].append([float((a - b).norm() / b.norm()) for a, b in pairs])
    bounded, full = (torch.tensor(errors[name]).mean(0) for name in ("bounded", "full"))
    assert (bounded < allowed * full).all()
    assert (bounded < 0.01).all()


def test_a_thousand_tiles_are_added_up_without_loss():
    """Of one token each, and all of one sign: a sum in bfloat16 stops growing halfway."""
    call, shares = one_sided_inputs(1000, vocabulary=100)
    exact = full_gradients(*call, torch.float32, shares)[1]
    found = bounded_gradients(*call, 64, shares)[1]
    assert (found - exact).norm() < 0.004 * exact.norm()
    assert float((found * exact).sum() / exact.square().sum()) == pytest.approx(1.0, abs=0.003)


# A tile of one token after the other. Behind the first one, each of the others is less than half
# of what a sum in bfloat16 can tell apart; together they are a sixth of the gradient.
LOPSIDED = {"tokens": 60, "first": 1 / 0.003}


def test_errors_of_bfloat16_have_no_direction():
    """Fifty steps of SGD: the mean error of a step is a fraction of its size, as chance has it."""
    weight = one_sided_inputs(1)[0][1].detach().float()
    total = torch.zeros_like(weight)
    squares = 0.0
    for step in range(50):
        (hidden, _, ids), shares = one_sided_inputs(**LOPSIDED, seed=100 + step)
        call = (hidden, weight.bfloat16().requires_grad_(), ids)
        exact = full_gradients(*call, torch.float32, shares)[1]
        error = bounded_gradients(*call, 64, shares)[1] - exact
        total += error
        squares += float(error.square().sum())
        weight += 0.02 * exact
    assert squares > 0.0
    # Errors without a common direction add up like those of a random walk.
    assert float(total.square().sum()) < 1.5 * squares


def test_fifty_steps_in_bfloat16_arrive_where_float32_does():
    """Weights in bfloat16, with a copy in float32 that the optimizer moves."""
    ends = []
    for gradient in (
        lambda call, shares: bounded_gradients(*call, 64, shares)[1],
        lambda call, shares: full_gradients(*call, torch.float32, shares)[1],
    ):
        weight = one_sided_inputs(1)[0][1].detach().float()
        begin = weight.clone()
        for step in range(50):
            (hidden, _, ids), shares = one_sided_inputs(**LOPSIDED, seed=step)
            call = (hidden, weight.bfloat16().requires_grad_(), ids)
            weight += 0.02 * gradient(call, shares)
        ends.append(weight - begin)
    assert (ends[0] - ends[1]).norm() / ends[1].norm() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_products(dtype):
    """float32 weights multiplied in `dtype`; statistics and gradients come back in float32."""
    hidden, weight, ids, _ = inputs()
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    rounded = [x.detach().to(dtype).double() for x in (hidden, weight)]
    expected, _ = definition(*rounded, ids, None, LogitTransform())
    found, *_ = linear_log_probs(hidden, weight, ids, None, Tiling(chunk=500, dtype=dtype))
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)
    grads = torch.autograd.grad(found.sum(), (hidden, weight))
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_autocast_around_the_call_changes_nothing():
    hidden, weight, ids, _ = inputs()
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    expected, *_ = linear_log_probs(hidden, weight, ids)
    with torch.autocast("cpu", torch.bfloat16):
        found, *_ = linear_log_probs(hidden, weight, ids)
    assert torch.equal(found, expected)


# --- Memory ---


class Largest(TorchDispatchMode):
    """The most entries of any result that is as wide as a part of the vocabulary."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.entries = tokens, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for found in result if isinstance(result, (tuple, list)) else [result]:
            is_tile = isinstance(found, torch.Tensor) and found.dim() == 2
            if is_tile and HIDDEN not in found.shape and found.shape[1] > 1:
                self.entries = max(self.entries, found.numel())
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [64, 100, 777, 3000, 7000])
def test_no_more_logits_exist_than_a_chunk(monkeypatch, chunk, dtype, with_entropy):
    """In the forward pass and in the backward pass, for a total of 70 x 203 logits."""
    monkeypatch.setattr(linear_logprobs, "TOKENS_IN_TILE", 32)
    hidden, weight, ids, shift = inputs(70, bias="plain")
    tensors = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, shift)]
    watch = Largest(70)
    with watch:
        found = linear_log_probs(
            tensors[0], tensors[1], ids, tensors[2], Tiling(chunk=chunk), with_entropy
        )
        forward, watch.entries = watch.entries, 0
        sum(x.sum() for x in found if x is not None).backward()
    assert 0 < forward <= chunk
    assert 0 < watch.entries <= chunk


def test_full_logits_would_be_seen():
    """What the test above looks for is there where no chunk bounds it."""
    hidden, weight, ids, _ = inputs(70)
    with Largest(70) as watch:
        linear_log_probs(hidden, weight, ids, None, Tiling(chunk=10**9))
    assert watch.entries == 70 * VOCABULARY


def test_the_default_chunk_is_larger_on_accelerators():
    assert default_chunk(torch.device("cpu")) == 2**20
    assert default_chunk(torch.device("cuda")) == 2**25
