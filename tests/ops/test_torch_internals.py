"""Private names of torch still are there, and mean what this package takes them for."""

import inspect

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import _common_utils, _runtime_utils
from torch.masked import masked_tensor
from transformers.modeling_outputs import ModelOutput

from trl.ops.torch_internals import (
    WRAPPER_ATTRIBUTES,
    TorchDispatchMode,
    default_store,
    forward_hooks,
    has_gradient_hooks,
    is_wrapper_subclass,
    module_before_compile,
    non_persistent_buffers,
    reshard_fsdp1,
    tree_leaves,
    tree_map,
    version_counter,
)


def test_changes_in_place_are_counted_and_reads_are_not():
    weight = nn.Parameter(torch.ones(3))
    before = version_counter(weight)
    weight.sum()
    assert version_counter(weight) == before
    with torch.no_grad():
        weight.mul_(2)
    assert version_counter(weight) == before + 1
    weight.detach()[0] = 5  # a view shares the counter
    assert version_counter(weight) == before + 2


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_seen_while_they_are_there(name):
    weight = nn.Parameter(torch.ones(3))
    assert not has_gradient_hooks(weight)
    handle = getattr(weight, name)(lambda gradient: None)
    assert has_gradient_hooks(weight)
    handle.remove()
    assert not has_gradient_hooks(weight)


def test_hooks_of_a_forward_can_be_taken_away_and_given_back():
    layer, calls = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *args: calls.append("before"))
    layer.register_forward_hook(lambda *args: calls.append("after"))
    hooks = [(each, dict(each)) for each in forward_hooks(layer)]
    for each, _ in hooks:
        each.clear()
    layer(torch.ones(1, 2))
    assert calls == []
    for each, held in hooks:
        each.update(held)
    layer(torch.ones(1, 2))
    assert calls == ["before", "after"]


def test_buffers_that_are_not_saved_are_named():
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("left_out", torch.ones(1), persistent=False)
    assert non_persistent_buffers(module) == {"left_out"}
    assert list(module.state_dict()) == ["saved"]


def test_the_module_below_a_compiled_one():
    layer = nn.Linear(2, 2)
    assert module_before_compile(torch.compile(layer)) is layer
    assert module_before_compile(layer) is None


def test_wrappers_hold_modules_under_the_names_that_state_dicts_show():
    fsdp, checkpointed, compiled = WRAPPER_ATTRIBUTES
    layer = nn.Linear(2, 2)
    assert getattr(checkpoint_wrapper(layer), checkpointed) is layer
    assert [*torch.compile(layer).state_dict()] == [f"{compiled}.weight", f"{compiled}.bias"]
    assert fsdp == _common_utils.FSDP_WRAPPED_MODULE


def test_the_store_in_which_ranks_meet():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        store = default_store()
        store.set("key", "value")
        assert store.check(["key"]) and not store.check(["other"])
        assert store.get("key") == b"value"
    finally:
        distributed.destroy_process_group()
    with pytest.raises(ValueError, match="process group"):
        default_store()


def test_a_unit_of_fsdp1_is_resharded_by_its_handle(monkeypatch):
    """The call itself runs in tests/distributed, on two processes."""
    signature = inspect.signature(_runtime_utils._reshard)
    assert [*signature.parameters] == ["state", "handle", "free_unsharded_flat_param"]
    monkeypatch.setattr(_runtime_utils, "_reshard", lambda *args: pytest.fail("it has no weights"))
    unit = nn.Module()
    unit._handle = None
    reshard_fsdp1(unit)


def test_operations_are_watched_below_autograd():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    with Watch():
        torch.zeros(2).add_(1)
    assert seen == ["aten.zeros.default", "aten.add_.Tensor"]


def test_tensors_that_hold_others_are_told_apart():
    inside = torch.ones(2)
    assert not is_wrapper_subclass(inside)
    assert not is_wrapper_subclass(nn.Parameter(inside))
    assert not is_wrapper_subclass(masked_tensor(inside, torch.ones(2, dtype=torch.bool)))
    assert is_wrapper_subclass(torch.nested.as_nested_tensor([inside], layout=torch.jagged))


def test_leaves_of_what_models_return():
    output = ModelOutput(first=torch.tensor(1), others=(torch.tensor(2), [torch.tensor(3)]))
    assert [int(leaf) for leaf in tree_leaves({"output": output})] == [1, 2, 3]
    added = tree_map(lambda one, other: one + other, output, output)
    assert isinstance(added, ModelOutput) and int(added.others[1][0]) == 6
