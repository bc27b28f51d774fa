"""The policy as generation needs it."""

import pytest
import torch
from accelerate import Accelerator
from tiny import lora_model, tiny_model, with_autocast
from torch import nn

from trl.models.unwrap import autocast_of, policy_for_inference


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_evaluation_inside_and_restored_after(accelerator, training):
    model = tiny_model(attention_dropout=0.5).train(training)
    with policy_for_inference(model, accelerator) as policy:
        assert policy is model
        assert not any(module.training for module in policy.modules())
    assert {module.training for module in model.modules()} == {training}


def test_mode_is_restored_after_an_error(accelerator):
    model = tiny_model().train()
    with pytest.raises(KeyError), policy_for_inference(model, accelerator):
        raise KeyError
    assert all(module.training for module in model.modules())


def test_wrappers_are_taken_off(accelerator):
    model = tiny_model().train()
    with policy_for_inference(nn.DataParallel(model), accelerator) as policy:
        assert policy is model
        assert not model.training
    assert model.training


def test_dropout_is_off(accelerator):
    model = tiny_model(attention_dropout=0.5).train()
    ids = torch.arange(10, 20)[None]
    with torch.no_grad(), policy_for_inference(model, accelerator) as policy:
        assert torch.equal(policy(ids).logits, policy(ids).logits)
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("build", [tiny_model, lora_model])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_autocast_around_a_decoder(build, dtype):
    """Nothing of the model runs to find it out, and hooks do not fire."""
    model = build()
    if dtype is not None:
        model = with_autocast(model, dtype)
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append("after"))
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    assert autocast_of(model) == dtype
    with torch.autocast("cpu", torch.float16):
        assert autocast_of(model) == (dtype or torch.float16)
    assert not calls
    model(input_ids=torch.tensor([[20, 21]]))
    assert calls, "the decoder runs again"
