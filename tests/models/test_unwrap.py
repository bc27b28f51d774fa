"""The policy as generation needs it."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tiny import tiny_model
from torch import nn

from trl.models.unwrap import check_engine, policy_for_inference


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


def engine(kind, stage=None):
    plugin = SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(
        distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=plugin if stage else None)
    )


@pytest.mark.parametrize(
    ("kind", "stage"), [(DistributedType.FSDP, None), (DistributedType.DEEPSPEED, 3)]
)
def test_sharded_weights_are_refused(kind, stage):
    with pytest.raises(ValueError, match=f"sharded by {kind.value} is not available"):
        check_engine(engine(kind, stage))


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        (DistributedType.NO, None),
        (DistributedType.MULTI_CPU, None),
        (DistributedType.MULTI_GPU, None),
        (DistributedType.DEEPSPEED, 1),
        (DistributedType.DEEPSPEED, 2),
    ],
)
def test_whole_weights_are_fine(kind, stage):
    assert check_engine(engine(kind, stage)) is None
