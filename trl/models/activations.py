"""Save memory of activations: offload what autograd saves to the host, or recompute less."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ..ops.torch_internals import version_counter
from .patches import add_checkpoint_options, checkpointed_layers
from .sharded import is_sharded

HOST = "cpu"  # device type to which tensors are moved; tensors that are on it stay
SMALLEST = 1024  # bytes; smaller tensors are not moved
MOST_LEAVING = 5  # tensors that may wait on the device until their copy to the host is done
PREFETCHED = 2  # tensors that are copied back before they are needed
# Substrings of the names of attention kernels.
ATTENTION = ("_attention", "flash_attn", "_flash_")


class _OffloadedTensor:
    """A saved tensor that was moved to the host."""

    def __init__(self, host: Tensor, device: torch.device, index: int):
        self.host = host
        self.device = device
        self.index = index  # in the order in which tensors were saved
        self.on_device: Tensor | None = None  # the copy back, once it has begun
        self.event: torch.cuda.Event | None = None  # recorded behind that copy


class _GatheredView:
    """A saved view of a weight that ZeRO-3 partitions, and gathers again for the backward pass.

    That gives the weight a new storage. Saving the tensor itself would keep the first one alive.
    """

    def __init__(self, parameter: Tensor, saved: Tensor):
        self._parameter = parameter
        self._size = saved.size()
        self._stride = saved.stride()
        self._offset = saved.storage_offset() - parameter.data.storage_offset()

    def current(self) -> Tensor:
        """Return the same view of the weight's current storage."""
        weight = self._parameter.data
        return weight.as_strided(self._size, self._stride, weight.storage_offset() + self._offset)


class ActivationOffloading:
    """Moves the tensors that autograd saves to the host until the backward pass needs them.

    These are not moved: tensors on a CPU, small tensors, parameters, buffers and views of them, and
    views that repeat elements. A storage that is saved twice is moved once. On CUDA devices copies
    run on their own stream, in parallel to the computation.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._model_tensors: list[Tensor] = []  # parameters and buffers
        # Addresses of storages that are not moved; with the parameter, if ZeRO-3 will replace it.
        self._staying: dict[int, Tensor | None] = {}
        self._gathered: dict[nn.Module, list[int]] = {}  # addresses that running modules added
        self._stream: torch.cuda.Stream | None = None
        # What was moved, by (storage, version, layout).
        self._offloaded: dict[
            tuple[object, ...], tuple[StorageWeakRef, weakref.ref[_OffloadedTensor]]
        ] = {}
        self._order: list[weakref.ref[_OffloadedTensor]] = []  # as tensors were saved
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Offload what forward passes inside save; their backward passes must end inside, too."""
        if not self._model_tensors:  # now, because the model is prepared only after __init__
            self._model_tensors = [*self._model.parameters(), *self._model.buffers()]
            if is_sharded(self._model):
                self._follow_gathered_weights()
        self._staying = dict.fromkeys(map(_address, self._model_tensors))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for collection in (self._offloaded, self._order, self._leaving, self._gathered):
                collection.clear()

    def _follow_gathered_weights(self) -> None:
        """Keep the gathered weights of a module on the device; they have new storages."""

        def enter(module: nn.Module, inputs: object) -> None:
            # FSDP1 replaces parameters by tensors that are plain attributes.
            attributes = (value for value in vars(module).values() if isinstance(value, Tensor))
            weights = [*module.parameters(recurse=False), *attributes]
            gathered = {_address(w): w if hasattr(w, "ds_id") else None for w in weights}
            self._gathered[module] = [x for x in gathered if x not in self._staying]
            self._staying |= gathered

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            # Activations may get the same addresses once these storages are freed.
            for address in self._gathered.pop(module, ()):
                self._staying.pop(address, None)

        for module in self._model.modules():
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor | _GatheredView:
        if tensor.device.type == HOST or tensor.nbytes < SMALLEST:
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._staying:
            weight = self._staying[storage.data_ptr()]
            return tensor if weight is None else _GatheredView(weight, tensor)
        if tensor.nbytes > storage.nbytes():
            return tensor
        # As long as the weak reference exists, no other storage gets the same address.
        storage_ref = StorageWeakRef(storage)
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage_ref.cdata, version_counter(tensor), layout)
        if key in self._offloaded:
            earlier = self._offloaded[key][1]()
            if earlier is not None:
                return earlier
        offloaded = _OffloadedTensor(
            self._to_host(tensor.detach()), tensor.device, len(self._order)
        )
        self._offloaded[key] = storage_ref, weakref.ref(offloaded)
        self._order.append(weakref.ref(offloaded))
        return offloaded

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream = self._stream or torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            event = self._stream.record_event()
        # The tensor is released only after its copy, since its memory may then be reused.
        self._leaving.append((tensor, event))
        if len(self._leaving) > MOST_LEAVING:
            torch.cuda.current_stream(tensor.device).wait_event(self._leaving.popleft()[1])
        return host

    def _unpack(self, saved: Tensor | _OffloadedTensor | _GatheredView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, _GatheredView):
            return saved.current()
        for _, event in self._leaving:
            torch.cuda.current_stream(saved.device).wait_event(event)
        self._leaving.clear()
        on_device = self._copy_back(saved)
        if saved.event is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.event)
            # The backward pass goes through saved tensors in reverse order.
            for index in range(max(0, saved.index - PREFETCHED), saved.index):
                earlier = self._order[index]()
                if earlier is not None:
                    self._copy_back(earlier)
        saved.on_device = None
        return on_device

    def _copy_back(self, offloaded: _OffloadedTensor) -> Tensor:
        """Return the tensor on its device; begin the copy unless it has begun."""
        if offloaded.on_device is not None:
            return offloaded.on_device
        device = offloaded.device
        if device.type != "cuda":
            offloaded.on_device = offloaded.host.to(device)
            return offloaded.on_device
        on_device = torch.empty_like(offloaded.host, device=device)
        stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            on_device.copy_(offloaded.host, non_blocking=True)
            offloaded.event = stream.record_event()
        offloaded.on_device = on_device
        return on_device


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; of a DTensor, that of this rank's shard."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    address: int = local.untyped_storage().data_ptr()
    return address


def keep_attention(model: nn.Module) -> None:
    """Let checkpointed layers save the outputs of attention, which takes longest to recompute."""
    contexts = partial(create_selective_checkpoint_contexts, _save_attention)
    for layer, options in checkpointed_layers(model):
        if "context_fn" not in options:
            add_checkpoint_options(layer, context_fn=contexts)


def _save_attention(
    context: SelectiveCheckpointContext,
    operation: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> CheckpointPolicy:
    name = str(operation)
    is_attention = any(part in name for part in ATTENTION) and "backward" not in name
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
