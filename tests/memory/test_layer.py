"""Each term against a real layer, whose tensors are counted one by one."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from trl.memory.layer import Layer
from trl.memory.model_size import model_size
from trl.memory.probes import TensorBytes

TOKENS = 53  # divides no width
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PRECISIONS = {"float32": (4, 4), "bfloat16": (2, 2), "autocast": (4, 2)}


def build(kind, precision, peft_config=None, **changes):
    """A model with one layer, and what is said about that layer."""
    model = tiny_model(kind, **(SHAPE | changes))
    size = model_size(model.config, peft_config)
    if precision == "bfloat16":
        model = model.bfloat16()
    if peft_config is not None:
        model = get_peft_model(model, peft_config).base_model.model
    model.train()
    return model, Layer(size, *PRECISIONS[precision], on_cpu=True)


def run(model, precision, hidden):
    decoder = model.model
    places = torch.arange(hidden.shape[1])[None]
    rotation = decoder.rotary_emb(hidden, places)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        return decoder.layers[0](hidden, position_embeddings=rotation, attention_mask=None)


def saved_bytes(model, precision, hidden):
    """Bytes that autograd keeps and that grow with the tokens, rotation tables excepted."""
    storages = {}

    def pack(tensor):
        if TOKENS in tensor.shape or TOKENS in tensor.squeeze().shape:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tables = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder = model.model
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            result = decoder.layers[0](hidden, position_embeddings=tables, attention_mask=None)
    for table in tables:
        storages.pop(table.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    return sum(storages.values())


def inputs(model, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    hidden = torch.randn(1, tokens, width, generator=generator).to(model.dtype)
    return hidden.requires_grad_()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_autograd_keeps(kind, precision):
    model, layer = build(kind, precision)
    hidden = inputs(model)
    # Under 4 bytes norms keep a copy in place of the layer's input.
    expected = layer.saved(has_input=precision != "bfloat16")
    assert saved_bytes(model, precision, hidden) == TOKENS * expected


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "gate_proj", "down_proj"]])
@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_autograd_keeps_with_an_adapter(precision, targets, dropout):
    config = LoraConfig(r=1, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
    model, layer = build("llama", precision, config)
    found = saved_bytes(model, precision, inputs(model)) / TOKENS
    assert layer.model.adapted == set(targets)
    # The narrow results of the adapters are left out.
    narrow = 4 * len(targets)
    assert layer.saved() <= found <= layer.saved() + narrow


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 32}], ids=["mlp", "attention"])
def test_working_set_without_gradient(precision, changes):
    tokens = 1024
    model, layer = build("llama", precision, **changes)
    hidden = inputs(model, tokens).detach()
    with torch.no_grad(), TensorBytes([hidden]) as tracker:
        before = tracker.live - hidden.untyped_storage().nbytes()  # the input counts
        run(model, precision, hidden)
    tables = layer.rotation * tokens
    assert tracker.peak - before == pytest.approx(layer.inference(tokens) + tables, rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_working_set_of_the_backward_pass(precision, kind):
    tokens = 4096  # next to which gradients of weights are small
    model, layer = build(kind, precision)
    hidden = inputs(model, tokens)
    with TensorBytes([hidden]) as tracker:
        result = run(model, precision, hidden)
        upstream = torch.ones_like(result)
        tracker.boundary()
        result.backward(upstream)
    tables = (layer.rotation + layer.stream) * tokens  # and the result, which is still held
    assert tracker.peak == pytest.approx(layer.backward(tokens) + tables, rel=0.02)


def test_merging_tails_costs_more_than_one_sequence():
    _, layer = build("qwen3", "float32", intermediate_size=16)
    assert layer.inference(100, 60) > layer.inference(100)
    assert layer.backward(100, 60) > layer.backward(100)


def test_copies_for_every_query_head():
    _, layer = build("qwen3", "float32", intermediate_size=16)
    repeating = replace(layer, repeats=True)
    copies = 2 * 4 * 64 * 100  # keys and values of 100 tokens, as wide as queries
    assert repeating.inference(100, 60) - layer.inference(100, 60) == copies
    assert repeating.backward(100, 60) - layer.backward(100, 60) == 2 * copies
    alone = replace(layer, model=replace(layer.model, keys=layer.model.queries))
    assert replace(alone, repeats=True).inference(100, 60) == alone.inference(100, 60)


def test_keys_of_shared_prompts_are_as_narrow_as_values():
    _, layer = build("llama", "autocast")
    assert layer.keys_and_values(shared=True) == 2 * 2 * 32
    assert layer.keys_and_values(shared=False) == (4 + 2) * 32


def test_what_the_last_norm_keeps():
    assert build("llama", "float32")[1].last_norm == 4 * 64 + 4 * 64
    assert build("llama", "bfloat16")[1].last_norm == 4 * 64 + 2 * 64
