"""A pretend accelerator, which finds on any machine what would go wrong on a real one.

Its tensors lie in main memory and are computed there, but they say that they are elsewhere, and
tensors of both places do not go together, as on GPUs. Everything that makes the host of a GPU wait
for it is counted, by the function of the package that asked for it:

    from pretend_device import DEVICE, PretendDevice, pretending

    with PretendDevice() as device:
        trainer = make_trainer(folder, kind=pretending(RLOOTrainer))
        trainer.train()
    device.waits["generation/transformers/shared_decoding.py _append"]

Importing this module registers the device with torch, for this process and for good: do it in a
process of its own. Not pretended: streams, memory, kernels of attention, and automatic precision.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

import trl

PACKAGE = Path(trl.__file__).parent
NAME = "pretend"
COPIES = ("aten::copy_", "aten::_to_copy")
INDEXED = (
    *("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_"),
    "aten::_index_put_impl_",
)
# Their results, or the shapes of these, are known once the device has computed them.
AWAITED = (
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"),
    *("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"),
    "aten::repeat_interleave",
)
# Kernels of a GPU take numbers from main memory, but joining tensors does not.
JOINED = ("aten::cat", "aten::stack")


class _Module(_DummyBackendModule):
    """What torch asks of `torch.pretend`; the random numbers of the device are never used."""

    def get_rng_state(self, *ignored: Any) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, *ignored: Any) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def empty_cache(self) -> None: ...

    def device(self, index: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
DEVICE = torch.device(NAME, 0)


class PretendTensor(Tensor):
    """A tensor of the device; `held` is where its values really are."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> PretendTensor:
        found = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        found.held = held
        return found

    def __repr__(self, **ignored: Any) -> str:
        return f"{NAME}({self.held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy: Tensor = PretendTensor(self.held.clone())
            is_parameter = getattr(self, "_is_param", False)
            copy = nn.Parameter(copy, self.requires_grad) if is_parameter else copy
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendDevice.current.run(func, args, kwargs or {})


class PretendDevice(TorchDispatchMode):
    """Runs operations inside it on either device.

    Attributes:
        waits (`Counter`): how often the host waited, by file and function of the package.
    """

    current: PretendDevice

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        PretendDevice.current = self
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> PretendDevice:
        for name in ("tensor", "as_tensor"):
            self._replace(torch, name, _made_on_device(getattr(torch, name)))
        self._replace(Tensor, "new_tensor", _new_tensor)
        self._replace(Tensor, "tolist", _through(lambda x: x.cpu(), Tensor.tolist))
        for name in ("data_ptr", "untyped_storage"):
            self._replace(Tensor, name, _through(_held, getattr(Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._replaced.close()
        super().__exit__(*error)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check where the operands are, count a wait, and compute."""
        name = func._schema.name
        if name == "aten::is_pinned":
            return False
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in tensors if isinstance(x, PretendTensor)]
        elsewhere = [x for x in tensors if not isinstance(x, PretendTensor)]
        if here and elsewhere and name not in COPIES:
            _check(name, args, elsewhere)
        if (here or _is_ours(kwargs.get("device"))) and _waits(name, args, kwargs):
            self.waits[_asker()] += 1
        given = tree_map(_held, (args, kwargs))
        if _is_ours(given[1].get("device")):
            given[1]["device"] = torch.device("cpu")
        result = func(*given[0], **given[1])
        if name == "aten::_local_scalar_dense" or not _is_result_here(name, args, kwargs, here):
            return result
        # An operation in place returns its operand.
        known = {id(x.held): x for x in here}
        return tree_map(lambda x: _wrapped(x, known), result)


def _check(name: str, args: tuple[Any, ...], elsewhere: Iterable[Tensor]) -> None:
    """Raise if a GPU would not take these operands from main memory."""
    in_place = name.endswith("_") and not isinstance(args[0], PretendTensor)
    if name in INDEXED and isinstance(args[0], PretendTensor):
        return  # an index is brought to the device
    if name in JOINED or in_place or any(x.dim() for x in elsewhere):
        shapes = [tuple(x.shape) for x in elsewhere]
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {name} in {_asker()} has operands of "
            f"shapes {shapes} in main memory, and others on {DEVICE}."
        )


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host would wait until the device has done all it was given."""
    if name == "aten::_to_copy":
        from_device, target = isinstance(args[0], PretendTensor), kwargs.get("device")
        crosses = target is not None and from_device != _is_ours(target)
        # What was copied from the device is read at once, so a copy that is not awaited is wrong.
        return crosses and (from_device or not kwargs.get("non_blocking"))
    if name == "aten::copy_":
        from_device = isinstance(args[1], PretendTensor)
        crosses = from_device != isinstance(args[0], PretendTensor)
        return crosses and (from_device or not (len(args) > 2 and args[2]))
    if name in INDEXED:
        index = [x for x in args[1] if x is not None]
        uploaded = any(not isinstance(x, PretendTensor) for x in index)
        return uploaded or any(x.dtype in (torch.bool, torch.uint8) for x in index)
    return name in AWAITED


def _is_result_here(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], here: list[PretendTensor]
) -> bool:
    if kwargs.get("device") is not None:
        return _is_ours(kwargs["device"])
    return isinstance(args[0], PretendTensor) if name == "aten::copy_" else bool(here)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _held(value: Any) -> Any:
    return value.held if isinstance(value, PretendTensor) else value


def _wrapped(value: Any, known: dict[int, PretendTensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else PretendTensor(value)


def _asker() -> str:
    """File and function of the package that are at work; those of others count for their caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return f"{path.relative_to(PACKAGE).as_posix()} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of the package"


# --- What does not reach the dispatcher with the device it was asked for ---


def _made_on_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` or `torch.as_tensor`."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, PretendTensor):
            return data.to(device or data.device, options.get("dtype") or data.dtype)
        if _is_ours(device):
            return make(data, **options).to(DEVICE)
        return make(data, device=device, **options)

    return made


def _new_tensor(like: Tensor, data: Any, **options: Any) -> Tensor:
    return torch.tensor(data, **({"dtype": like.dtype, "device": like.device} | options))


def _through(change: Callable[[Tensor], Tensor], original: Callable[[Tensor], Any]) -> Any:
    return lambda tensor: original(change(tensor))


def pretending(kind: Any) -> Any:
    """A trainer class whose options put everything on the device."""

    class Config(kind.config_class):
        @cached_property
        def _setup_devices(self) -> torch.device:
            kind.config_class._setup_devices.func(self)
            PartialState._shared_state["device"] = DEVICE
            return DEVICE

    return type(kind.__name__, (kind,), {"config_class": Config})
