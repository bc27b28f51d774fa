import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from trl.models.head import cast_head_to_float32

IDS = torch.tensor([[8, 9, 10, 11]])


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_a_float32_head(tied):
    model = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    hidden = model.model(IDS).last_hidden_state
    expected = hidden.float() @ model.lm_head.weight.float().T
    rough = model(IDS).logits
    cast_head_to_float32(model)
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found = model(IDS).logits
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 < (rough - expected).abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_copies_have_their_own_head(tied):
    model = tiny_model(tie_word_embeddings=tied)
    cast_head_to_float32(model)
    copied = copy.deepcopy(model)
    assert (copied.lm_head.weight is copied.model.embed_tokens.weight) == tied
    before = copied(IDS).logits
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert torch.equal(copied(IDS).logits, before)


def test_gradients_reach_the_head():
    model = tiny_model().to(torch.bfloat16)
    cast_head_to_float32(model)
    model(IDS).logits.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("tied", [False, True])
def test_layers_keep_their_precision(tied):
    model = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    before = model.model(IDS).last_hidden_state
    cast_head_to_float32(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert before.dtype == torch.bfloat16
    assert torch.equal(model.model(IDS).last_hidden_state, before)


def test_models_without_head_are_refused():
    with pytest.raises(ValueError, match="the model has no output projection"):
        cast_head_to_float32(tiny_model().model)


def test_adapters_on_the_head_are_refused():
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="target_modules"):
        cast_head_to_float32(model)
