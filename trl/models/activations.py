"""What autograd keeps for the backward pass: moved to the host, or reduced by recomputing."""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..torch_internals import version_counter
from .patches import add_checkpoint_options, checkpointed_layers
from .sharded import is_sharded

HOST = "cpu"  # where tensors wait; those of devices of this type stay
SMALLEST = 1024  # bytes that are worth a copy
MOST_LEAVING = 5  # tensors that wait on the device until their copy is done
AHEAD = 2  # tensors that are brought back before they are needed
# Parts of the names of attention kernels.
ATTENTION = ("_attention", "flash_attn", "_flash_")


class _Moved:
    """A saved tensor on the host, and what brings it back."""

    def __init__(self, host: Tensor, device: torch.device, place: int):
        self.host, self.device, self.place = host, device, place
        self.back: Tensor | None = None
        self.event: Any = None


class _Weight:
    """A saved view of a weight that ZeRO-3 partitions, and gathers again for the backward pass.

    The weight gets another storage then: a saved tensor would keep the first one from being freed.
    """

    def __init__(self, parameter: Tensor, saved: Tensor):
        self._parameter = parameter
        self._size = saved.size()
        self._stride = saved.stride()
        self._offset = saved.storage_offset() - parameter.data.storage_offset()

    def now(self) -> Tensor:
        """The same view of the storage that the weight has now."""
        weight = self._parameter.data
        return weight.as_strided(self._size, self._stride, weight.storage_offset() + self._offset)


class ActivationOffloading:
    """Moves what autograd saves off its device while it waits for the backward pass.

    What stays: tensors of a CPU, small ones, parameters, buffers and views of them, and views that
    repeat elements. A storage that is saved twice is moved once. On CUDA devices copies run on a
    stream of their own, beside the computation.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._held: list[Tensor] = []  # by the model
        # Addresses of storages that stay, and the parameters of those that ZeRO-3 will replace.
        self._staying: dict[int, Tensor | None] = {}
        self._gathered: dict[nn.Module, list[int]] = {}  # those of modules that are running
        self._stream: Any = None
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}
        self._order: list[weakref.ref[_Moved]] = []
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Move what forward passes inside save; backward passes must end inside, too."""
        if not self._held:  # the model is prepared by now
            self._held = [*self._model.parameters(), *self._model.buffers()]
            if is_sharded(self._model):
                self._follow_gathered_weights()
        self._staying = dict.fromkeys(map(_address, self._held))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for passing in (self._known, self._order, self._leaving, self._gathered):
                passing.clear()

    def _follow_gathered_weights(self) -> None:
        """Know the whole weights of a module while it runs: they have storages of their own."""

        def enter(module: nn.Module, inputs: Any) -> None:
            # FSDP1 replaces parameters by tensors that are plain attributes.
            attributes = (value for value in vars(module).values() if isinstance(value, Tensor))
            weights = [*module.parameters(recurse=False), *attributes]
            gathered = {_address(w): w if hasattr(w, "ds_id") else None for w in weights}
            self._gathered[module] = [one for one in gathered if one not in self._staying]
            self._staying |= gathered

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            # Activations may get the same addresses once these storages are freed.
            for address in self._gathered.pop(module, ()):
                self._staying.pop(address, None)

        for module in self._model.modules():
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)

    def _pack(self, tensor: Tensor) -> Tensor | _Moved | _Weight:
        if tensor.device.type == HOST or tensor.nbytes < SMALLEST:
            return tensor
        held = tensor.untyped_storage()
        if held.data_ptr() in self._staying:
            weight = self._staying[held.data_ptr()]
            return tensor if weight is None else _Weight(weight, tensor)
        if tensor.nbytes > held.nbytes():
            return tensor
        # A weak reference keeps the address of the storage from being given to another one.
        storage = StorageWeakRef(tensor.untyped_storage())
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage.cdata, version_counter(tensor), layout)
        if key in self._known and (moved := self._known[key][1]()) is not None:
            return moved
        moved = _Moved(self._to_host(tensor.detach()), tensor.device, len(self._order))
        self._known[key] = storage, weakref.ref(moved)
        self._order.append(weakref.ref(moved))
        return moved

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            event = self._stream.record_event()
        # The tensor is let go only behind its copy, so that its memory is free to be used again.
        self._leaving.append((tensor, event))
        if len(self._leaving) > MOST_LEAVING:
            torch.cuda.current_stream(tensor.device).wait_event(self._leaving.popleft()[1])
        return host

    def _unpack(self, saved: Tensor | _Moved | _Weight) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, _Weight):
            return saved.now()
        for _, event in self._leaving:
            torch.cuda.current_stream(saved.device).wait_event(event)
        self._leaving.clear()
        self._bring(saved)
        if saved.event is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.event)
            for place in range(max(0, saved.place - AHEAD), saved.place):
                if (earlier := self._order[place]()) is not None:
                    self._bring(earlier)
        found, saved.back = torch.as_tensor(saved.back), None
        return found

    def _bring(self, moved: _Moved) -> None:
        """Begin to copy a tensor to its device, unless that has begun."""
        if moved.back is not None:
            return
        if moved.device.type != "cuda":
            moved.back = moved.host.to(moved.device)
            return
        moved.back = torch.empty_like(moved.host, device=moved.device)
        self._stream.wait_stream(torch.cuda.current_stream(moved.device))
        with torch.cuda.stream(self._stream):
            moved.back.copy_(moved.host, non_blocking=True)
            moved.event = self._stream.record_event()


def _address(tensor: Any) -> int:
    """Where the storage of a tensor begins, or that of this rank's part of it."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().data_ptr()


def keep_attention(model: nn.Module) -> None:
    """Let layers that are recomputed keep what attention returned: it takes longest."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    for layer, options in checkpointed_layers(model):
        if "context_fn" not in options:
            add_checkpoint_options(layer, context_fn=contexts)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(operation)
    is_kept = any(word in name for word in ATTENTION) and "backward" not in name
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
