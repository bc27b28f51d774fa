"""Projections that must be called: log-probabilities and gradients are those of full logits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn

from trl.models.chunked_head import chunked_log_probs, summing_in_float32
from trl.models.lm_head import OutputHead
from trl.ops.linear_logprobs import LogitTransform

TOKENS, HIDDEN, VOCABULARY = 23, 32, 95
TRANSFORM = LogitTransform(temperature=0.7, scale=1.5, softcap=4.0)
STEPS = [1, 2, 7, 22, 23, 100]


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), ids


def definition(module, hidden, ids, transform=TRANSFORM):
    logits = module(hidden).double() * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    every = (logits / transform.temperature).log_softmax(-1)
    return every[torch.arange(len(ids)), ids], -(every.exp() * every).sum(-1)


def lora_head(dropout=0.0):
    torch.manual_seed(0)
    config = LoraConfig(
        target_modules=["lm_head"], r=4, init_lora_weights=False, lora_dropout=dropout
    )
    return get_peft_model(tiny_model(), config).get_base_model().lm_head


def hooked_head():
    """A hook that changes what the projection returns."""
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCABULARY)
    module.register_forward_hook(lambda module, args, output: output * 1.5 + 0.1)
    return module


def hooked_before():
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return module


def with_bias():
    """A module of two projections, both with bias."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))


MODULES = {
    "lora": lora_head,
    "hook": hooked_head,
    "hook before": hooked_before,
    "bias": with_bias,
    "plain": lambda: nn.Linear(HIDDEN, VOCABULARY),
}


def gradients(value, hidden, module):
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.autograd.grad(value, [hidden, *trained], retain_graph=True)


def close(ours, theirs, bound):
    pairs = list(zip(ours, theirs, strict=True))
    return all((a.double() - b.double()).norm() <= bound * b.double().norm() for a, b in pairs)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("step", STEPS)
def test_heads_that_are_called_equal_full_logits(kind, step):
    """Gradients of hidden states and of all trained parameters, those of adapters among them."""
    module = MODULES[kind]().double()
    hidden, ids = data()
    logps, entropies = definition(module, hidden, ids)
    weights = torch.linspace(-1, 1, TOKENS).double()
    expected = gradients((logps * weights + 0.3 * entropies).sum(), hidden, module)
    assert len(expected) > 1
    head = OutputHead(module, TRANSFORM, VOCABULARY, step * VOCABULARY)
    assert head.is_plain == (kind == "plain")
    found, none = head.scores(hidden, ids)[:2]
    assert none is None and (found - logps).abs().max() < 1e-10
    ours, spread = head.scores(hidden, ids, with_entropy=True)[:2]
    assert (ours - logps).abs().max() < 1e-10 and (spread - entropies).abs().max() < 1e-10
    got = gradients((ours * weights + 0.3 * spread).sum(), hidden, module)
    assert close(got, expected, 1e-10)
    alone = gradients((entropies * weights).sum(), hidden, module)
    assert close(gradients((spread * weights).sum(), hidden, module), alone, 1e-10)


@pytest.mark.parametrize("kind", ["lora", "bias", "plain"])
@pytest.mark.parametrize("step", STEPS)
def test_heads_of_sharded_weights_are_called_once(kind, step):
    """In one call, in which the weight is whole; the calls of submodules are theirs."""
    module, calls = MODULES[kind]().double(), []
    hidden, ids = data()
    logps, entropies = definition(module, hidden, ids)
    weights = torch.linspace(-1, 1, TOKENS).double()
    expected = gradients((logps * weights + 0.3 * entropies).sum(), hidden, module)
    module.register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    head = OutputHead(module, TRANSFORM, VOCABULARY, step * VOCABULARY, sharded=True)
    ours, spread = head.scores(hidden, ids, with_entropy=True)[:2]
    assert calls == [TOKENS] and "forward" not in vars(module)
    assert (ours - logps).abs().max() < 1e-10 and (spread - entropies).abs().max() < 1e-10
    got = gradients((ours * weights + 0.3 * spread).sum(), hidden, module)
    assert close(got, expected, 1e-10)


def test_only_so_many_tokens_are_projected_at_once():
    sizes = []
    module = hooked_head()
    module.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    hidden, ids = data(torch.float32)
    found, _ = OutputHead(module, TRANSFORM, VOCABULARY, 5 * VOCABULARY).scores(hidden, ids)[:2]
    assert sizes == [5, 5, 5, 5, 3]
    found.sum().backward()
    assert sizes[5:] == [3, 5, 5, 5, 5], "projected again for the backward pass"


def test_frozen_weights_get_no_gradient():
    module = lora_head()
    hidden, ids = data(torch.float32)
    OutputHead(module, TRANSFORM, VOCABULARY, 300).scores(hidden, ids)[0].sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert [name for name in grads if grads[name] is not None] == [
        name for name in grads if "lora_" in name
    ]


def test_gradients_of_chunks_are_added_in_float32():
    """A bfloat16 sum over 23 chunks would round 23 times."""
    torch.manual_seed(0)
    module = nn.Linear(HIDDEN, VOCABULARY).bfloat16()
    exact = nn.Linear(HIDDEN, VOCABULARY).double()
    exact.load_state_dict(module.state_dict())
    hidden, ids = data(torch.bfloat16)
    wide = hidden.detach().double().requires_grad_()
    expected = gradients(definition(exact, wide, ids)[0].sum(), wide, exact)
    full = gradients(definition(module, hidden, ids)[0].sum(), hidden, module)
    module.register_forward_hook(lambda module, args, output: None)
    head = OutputHead(module, TRANSFORM, VOCABULARY, VOCABULARY)
    found = gradients(head.scores(hidden, ids)[0].sum(), hidden, module)
    for ours, theirs, wanted in zip(found, full, expected, strict=True):
        error = (ours.double() - wanted).norm() / wanted.norm()
        assert error < 1.3 * (theirs.double() - wanted).norm() / wanted.norm() + 1e-6


@pytest.mark.parametrize(
    ("kind", "chunks", "bound"),
    [
        ("called", 1000, 0.004),
        # Autograd adds these in bfloat16: with chunks of 220 tokens, as many as 8,000 tokens have.
        ("sharded", 40, 0.01),
    ],
)
def test_chunks_that_add_up_to_a_long_sum_in_bfloat16(kind, chunks, bound):
    """All of one sign, so that no error is balanced by another."""
    generator = torch.Generator().manual_seed(0)
    hidden = (1 + 0.3 * torch.randn(1000, 8, generator=generator)).bfloat16()
    weight = (torch.randn(60, 8, generator=generator) / 4).bfloat16()
    ids = torch.zeros(1000, dtype=torch.long)
    wide = weight.float().requires_grad_()
    every = (hidden.float() @ wide.T).log_softmax(-1)
    (exact,) = torch.autograd.grad(every[:, 0].mean(), wide)
    head = nn.Linear(8, 60, bias=False)
    head.weight = nn.Parameter(weight)
    run = summing_in_float32(head) if kind == "called" else head
    logps, *_ = chunked_log_probs(run, hidden.requires_grad_(), ids, 1000 // chunks)
    (found,) = torch.autograd.grad(logps.mean(), head.weight)
    assert found.dtype is torch.bfloat16
    assert (found.float() - exact).norm() < bound * exact.norm()


def test_chunks_of_autocast_add_up_in_the_precision_of_the_weight():
    """A weight that autocast keeps for all chunks would sum their gradients in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    hidden = (1 + 0.3 * torch.randn(1000, 8, generator=generator)).requires_grad_()
    head = nn.Linear(8, 60, bias=False)
    head.register_forward_hook(lambda module, args, output: None)
    ids = torch.zeros(1000, dtype=torch.long)
    (exact,) = gradients(head(hidden).log_softmax(-1)[:, 0].mean(), hidden, head)[1:]
    with torch.autocast("cpu", torch.bfloat16):
        logps = OutputHead(head, LogitTransform(), 60, 60).scores(hidden, ids, torch.bfloat16)[0]
    (found,) = gradients(logps.mean(), hidden, head)[1:]
    assert (found - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("step", [23, 5])
def test_dropout_is_the_same_when_logits_are_computed_again(step):
    """An adapter with dropout: the gradient belongs to the values that were returned."""
    module = lora_head(dropout=0.5).double().train()
    hidden, ids = data()
    torch.manual_seed(7)
    pieces = [
        definition(module, hidden[at : at + step], ids[at : at + step])[0]
        for at in range(0, TOKENS, step)
    ]
    logps = torch.cat(pieces)
    expected = gradients(logps.sum(), hidden, module)
    torch.manual_seed(7)
    head = OutputHead(module, TRANSFORM, VOCABULARY, step * VOCABULARY)
    found, _ = head.scores(hidden, ids)[:2]
    torch.rand(5)  # what a loss may draw
    assert (found - logps).abs().max() < 1e-10
    assert close(gradients(found.sum(), hidden, module), expected, 1e-10)
