"""States of real optimizers after a step, and the table of those that need other packages."""

import pytest
import torch
from tiny import tiny_model
from transformers import Adafactor, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from trl.memory.model_size import model_size
from trl.memory.optimizers import KNOWN, state_bytes, states_of


def held(optimizer):
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t) and t.dim())


def stepped(name, arguments, dtype):
    model = tiny_model("llama").to(dtype)
    options = TrainingArguments("unused", optim=name, optim_args=arguments, use_cpu=True)
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(options)
    optimizer = kind(model.parameters(), **kwargs)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, model_size(model.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("adamw_torch", None), ("adamw_torch_fused", None), ("sgd", None)),
        *(("sgd", "momentum=0.9"), ("sgd", "momentum=0"), ("rmsprop", None), ("adagrad", None)),
    ],
)
def test_states_of_torch(name, arguments, dtype):
    optimizer, size = stepped(name, arguments, dtype)
    assert state_bytes(name, arguments, size, dtype.itemsize) == held(optimizer)


def test_adafactor_keeps_rows_and_columns():
    optimizer, size = stepped("adafactor", None, torch.float32)
    assert isinstance(optimizer, Adafactor)
    assert state_bytes("adafactor", None, size, 4) == held(optimizer)


def test_eight_bits_take_a_byte_for_each_state():
    size = model_size(tiny_model("llama").config)
    for weight_bytes in (2, 4):
        assert state_bytes("adamw_bnb_8bit", None, size, weight_bytes) == 2 * size.trainable
        assert state_bytes("lion_8bit", None, size, weight_bytes) == size.trainable


def test_names_are_those_of_transformers():
    assert set(KNOWN) <= {name.value for name in OptimizerNames}


def test_an_unknown_optimizer_is_taken_to_be_like_adam():
    size = model_size(tiny_model("llama").config)
    assert states_of("lomo") is None
    assert state_bytes("lomo", None, size, 2) == 8 * size.trainable
