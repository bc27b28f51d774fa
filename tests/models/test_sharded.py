"""Finding layers, and taking hooks of engines away; the engines are in tests/distributed."""

from contextlib import contextmanager

import pytest
import torch
from tiny import tiny_model
from torch import nn

from trl.models import sharded
from trl.models.sharded import (
    _without_hooks,
    gather_of,
    gathered,
    layers_of,
    replaced_forward,
    unwrapped,
    whole,
)


def test_layers_are_the_members_of_outermost_lists():
    model = tiny_model(num_hidden_layers=3)
    model.model.layers[1].experts = nn.ModuleList([nn.Linear(2, 2)])
    assert list(layers_of(nn.Sequential(model))) == list(model.model.layers)


def test_whole_weights_have_no_engine():
    model = tiny_model()
    assert gather_of(model) is None
    before = dict(model.model.layers[0].__dict__)
    with gathered(model, at_once=False):
        assert "forward" not in model.model.layers[0].__dict__
    assert dict(model.model.layers[0].__dict__) == before
    parameter = model.lm_head.weight
    assert whole(parameter).data_ptr() == parameter.data_ptr()
    assert not whole(parameter).requires_grad


def test_a_layer_is_gathered_while_it_runs_even_if_it_fails(monkeypatch):
    held, seen = [], []

    @contextmanager
    def engine(modules):
        held.append(modules)
        try:
            yield
        finally:
            held.pop()

    layer = nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    layer[0].register_forward_hook(lambda *args: seen.append(held[-1]))
    monkeypatch.setattr(sharded, "gather_of", lambda model: engine)
    with gathered(model, at_once=False):
        assert held == [[model, model["layers"]]]
        layer(torch.zeros(1, 2))
        with pytest.raises(RuntimeError):
            layer(torch.zeros(1, 3))
        layer(torch.zeros(1, 2))
    assert seen == [[layer, layer[0]]] * 2
    assert held == []
    assert "forward" not in layer.__dict__


def test_a_forward_of_the_module_itself_comes_back():
    layer = nn.Linear(2, 2)
    own = layer.forward = lambda x: x
    with replaced_forward(layer, lambda x: 2 * x):
        assert layer(1) == 2
    assert layer.forward is own


def test_hooks_of_engines_are_away_for_a_while():
    module, calls = nn.Linear(2, 2), []

    def engine(*args):
        calls.append("engine")

    def users(*args):
        calls.append("user")

    engine.__module__ = "deepspeed.runtime.zero"
    for hook in (engine, users):
        module.register_forward_pre_hook(hook)
        module.register_forward_hook(hook)
    with _without_hooks(module):
        module(torch.zeros(1, 2))
        assert calls == ["user"] * 2
    calls.clear()
    module(torch.zeros(1, 2))
    assert calls == ["engine", "user"] * 2


def test_wrappers_around_a_model_are_left_out():
    """Those of DeepSpeed and FSDP1 are met in `tests/distributed`."""
    model = nn.Linear(2, 2)
    assert unwrapped(model) is model
    for outer in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert unwrapped(outer) is model
    assert unwrapped(torch.compile(nn.DataParallel(model), backend="eager")) is model
