"""The policy as generation needs it."""

import pytest
import torch
from accelerate import Accelerator
from tiny import tiny_model
from torch import nn

from trl.models.unwrap import policy_for_inference


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
