"""Private names of transformers and accelerate still are there, and do what is expected of them."""

import copy
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny import tiny_model
from torch import nn
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

from trl.models.patches import (
    EAGER,
    add_checkpoint_options,
    attention_implementation,
    checkpointed_layers,
    forward_below_autocast,
    prepare_untracked,
    wrap_attention,
)

IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def unpatched():
    """Restore what `wrap_attention` replaces."""
    attention = AttentionInterface().get("sdpa")
    eager = vars(modeling_llama)[EAGER]
    yield
    AttentionInterface.register("sdpa", attention)
    vars(modeling_llama)[EAGER] = eager


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_attention_of_a_model_has_a_name(name):
    model = tiny_model()
    model.set_attn_implementation(name)
    assert attention_implementation(model.config) == name
    assert attention_implementation(copy.deepcopy(model.config)) == name


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_layers_call_what_their_attention_is_replaced_by(unpatched, name):
    model, calls = tiny_model(), []
    model.set_attn_implementation(name)
    before = model(IDS).logits

    def wrap(original):
        def attention(module, *args, **kwargs):
            calls.append(module)
            return original(module, *args, **kwargs)

        return attention

    wrap_attention(model, model.config, wrap)
    assert torch.equal(model(IDS).logits, before)
    assert calls == [layer.self_attn for layer in model.model.layers]
    calls.clear()
    model.set_attn_implementation({"sdpa": "eager", "eager": "sdpa"}[name])
    model(IDS)
    assert not calls, "the other one is as it was"


def test_an_attention_that_no_table_has_is_left_alone(unpatched):
    model = tiny_model()
    model.config._attn_implementation = "unknown"
    wrap_attention(model, model.config, lambda original: pytest.fail("there is nothing to wrap"))


def test_options_of_recomputing_are_read_and_added():
    model, calls = tiny_model(), []
    assert [*checkpointed_layers(model)] == []
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = dict(checkpointed_layers(model))
    assert {*model.model.layers} <= layers.keys()
    assert all(options == {"use_reentrant": False} for options in layers.values())

    def contexts():
        calls.append(1)
        return nullcontext(), nullcontext()

    for layer in layers:
        add_checkpoint_options(layer, context_fn=contexts)
    assert all(
        options == {"use_reentrant": False, "context_fn": contexts}
        for _, options in checkpointed_layers(model)
    )
    model.train()(IDS).logits.sum().backward()
    assert len(calls) == len(model.model.layers)


def test_the_forward_below_the_autocast_of_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)  # its precision is that of the process
    model = tiny_model()
    assert forward_below_autocast(model) is None
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    assert prepared is model
    hidden = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(
        lambda module, args, output: hidden.append(output.dtype)
    )
    model(IDS)
    forward_below_autocast(model)(IDS)
    assert hidden == [torch.bfloat16, torch.float32]
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_that_is_prepared_apart_is_not_saved_with_others(tmp_path):
    """Under FSDP1 it is sharded as well: tests/distributed trains with it."""
    accelerator = Accelerator(cpu=True)
    policy = accelerator.prepare(nn.Linear(2, 2))
    reference = prepare_untracked(accelerator, nn.Linear(2, 2))
    assert isinstance(reference, nn.Linear)
    accelerator.save_state(str(tmp_path))
    assert [path.name for path in tmp_path.glob("model*.safetensors")] == ["model.safetensors"]
    accelerator.prepare(nn.Linear(3, 3))
    accelerator.save_state(str(tmp_path))
    assert len([*tmp_path.glob("model*.safetensors")]) == 2, "both that were prepared as always"
    assert policy is not reference
