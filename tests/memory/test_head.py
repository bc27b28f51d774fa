"""Each figure against the tensors that really exist."""

import pytest
import torch
from tiny import tiny_model

from trl.generation.transformers.sampler import pick
from trl.memory.head import Head
from trl.memory.model_size import model_size
from trl.memory.probes import TensorBytes
from trl.models.lm_head import OutputHead
from trl.ops.linear_logprobs import CHUNK_ON_ACCELERATOR, CHUNK_ON_CPU, LogitTransform

SIZES = {"hidden_size": 32, "vocab_size": 4096}
PRECISIONS = {"float32": (4, 4), "bfloat16": (2, 2), "autocast": (4, 2)}


def build(precision, chunk):
    model = tiny_model("llama", **SIZES)
    head = Head(model_size(model.config), *PRECISIONS[precision], chunk, on_cpu=True)
    projection = model.lm_head.bfloat16() if precision == "bfloat16" else model.lm_head
    autocast = torch.bfloat16 if precision == "autocast" else None
    return head, OutputHead(projection, LogitTransform(), SIZES["vocab_size"], chunk), autocast


def peaks(tokens, real, autocast):
    """Most bytes of the forward and of the backward pass, the weight excepted."""
    weight = real.module.weight
    hidden = torch.randn(tokens, SIZES["hidden_size"]).to(weight.dtype).requires_grad_()
    ids = torch.arange(tokens)
    held = weight.untyped_storage().nbytes()
    with TensorBytes([hidden, weight]) as tracker:
        logps, entropies = real.log_probs(hidden, ids, autocast, with_entropy=True)
        forward = tracker.boundary()["tensors_peak"]
        del entropies
        logps.sum().backward()
    return forward - held, tracker.peak - held


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("chunk", [2**17, 2**18])
def test_tiles(precision, chunk):
    head, real, autocast = build(precision, chunk)
    forward, backward = peaks(512, real, autocast)
    assert head.forward(512) == pytest.approx(forward, rel=0.1)
    assert head.backward(512) == pytest.approx(backward, rel=0.1)


@pytest.mark.parametrize("limit", [2**12, 2**24])
def test_products_that_are_added_to_wider_sums(monkeypatch, limit):
    """One tile of the whole vocabulary: products of its gradient exist a block at a time."""
    for module in ("trl.ops.linear_logprobs", "trl.memory.head"):
        monkeypatch.setattr(f"{module}.PRODUCT_ELEMENTS", limit)
    head, real, autocast = build("bfloat16", 2**20)
    _, backward = peaks(8, real, autocast)
    assert head.backward(8) == pytest.approx(backward, rel=0.06)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [512, 4096])
def test_all_logits_at_once(precision, tokens):
    head, real, autocast = build(precision, 0)
    forward, backward = peaks(tokens, real, autocast)
    assert head.forward(tokens) == pytest.approx(forward, rel=0.1)
    assert head.backward(tokens) == pytest.approx(backward, rel=0.1)


def test_drawing_a_token():
    head, real, _ = build("float32", 0)
    hidden, draws = torch.randn(64, SIZES["hidden_size"]), torch.rand(64, dtype=torch.float64)
    with torch.no_grad(), TensorBytes() as tracker:
        logits = real.logits(hidden, None)
        every = (logits / 1.0).log_softmax(-1)
        pick(logits, draws)
    held = real.module.weight.untyped_storage().nbytes()
    assert head.sampling(64) == pytest.approx(tracker.peak - held, rel=0.05)
    assert every.shape == logits.shape


def test_the_rows_that_draw_together():
    head, _, _ = build("float32", 8192)
    assert head.sampling(100) == head.sampling(2)
    assert head.sampling(1) == head.sampling(2) / 2
    assert head.sampling_at_once(100) == 100 * head.sampling_at_once(1)


def test_defaults_by_device():
    size = model_size(tiny_model("llama", **SIZES).config)
    for on_cpu, chunk in ((True, CHUNK_ON_CPU), (False, CHUNK_ON_ACCELERATOR)):
        default = Head(size, 4, 4, None, on_cpu)
        assert default.forward(2048) == Head(size, 4, 4, chunk).forward(2048)


def test_a_frozen_head_has_no_gradient():
    from peft import LoraConfig

    config = tiny_model("llama", **SIZES).config
    frozen = model_size(config, LoraConfig(target_modules=["q_proj"]))
    assert Head(frozen, 4, 4).gradient == 0
    trained = Head(model_size(config), 2, 2)
    assert trained.gradient == 2 * 32 * 4096
    assert Head(model_size(config), 4, 2).whole_cast == 2 * 32 * 4096
    assert trained.whole_cast == 0
