"""Lets trl 1.16.0 take on a CPU the path of its head that it takes on a GPU.

On a GPU that release folds tiles of logits with kernels that work in place; on a CPU it does the
same arithmetic with many temporaries of the tile's size. To compare memory with what its GPU users
have, the two kernels are replaced by plain functions that read one row of a tile at a time. They
are written from the kernels' argument names; their results equal those of the CPU path. They say
nothing about speed.

In its backward pass the release also makes float32 copies of each bfloat16 tile, to multiply
matrices. It is not known here whether it does so on a GPU, which can multiply without them.
`LeaveOutCopies` takes it that it does not, so the numbers are the least that it may hold.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The smallest tile. No other matrix of the tiny model has as many columns and rows.
COLUMNS = 4096
ROWS = 32


class Launcher:
    """A stand-in for a compiled kernel: `kernel[grid](...)` calls a function."""

    launched = 0  # times, all kernels together

    def __init__(self, function: Callable[..., None]):
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        Launcher.launched += 1
        return self._function


def install() -> None:
    """Replace the kernels by the functions."""
    kernels = importlib.import_module("trl.kernels.chunked_logprob")
    kernels._forward_kernel = Launcher(forward_tile)
    kernels._backward_kernel = Launcher(backward_tile)
    kernels.triton = SimpleNamespace(cdiv=lambda size, block: -(-size // block))  # grids ask for it
    for name in ("trl.kernels.chunked_logprob", "trl.trainer.utils"):
        importlib.import_module(name)._use_triton = lambda device: True


class LeaveOutCopies(TorchDispatchMode):
    """Counts float32 copies of bfloat16 tiles separately from other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._library = ctypes.CDLL(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it makes apart if it copies a tile."""
        kwargs = kwargs or {}
        if not is_copy_of_tile(func, args, kwargs):
            return func(*args, **kwargs)
        self._library.cpumem_apart(1)
        try:
            return func(*args, **kwargs)
        finally:
            self._library.cpumem_apart(0)


def is_copy_of_tile(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation copies a tile from bfloat16 to float32."""
    if func is not torch.ops.aten._to_copy.default or kwargs.get("dtype") is not torch.float32:
        return False
    rows, columns = sorted(args[0].shape) if args[0].dim() == 2 else (0, 0)  # or transposed
    return args[0].dtype is torch.bfloat16 and columns >= COLUMNS and rows >= ROWS


def _scaled(row: Tensor, columns: int, options: dict[str, Any]) -> Tensor:
    if options["HAS_SOFTCAP"]:
        raise NotImplementedError("soft-capped logits do not occur in this benchmark")
    return row[:columns].float().mul_(options["logit_scale"]).mul_(options["inv_t"])


@torch.no_grad()
def forward_tile(
    tile: Tensor,
    tile_stride: int,
    targets: Tensor,
    running_max: Tensor,
    sum_exp: Tensor,
    x_sum_exp: Tensor,
    sq_sum_exp: Tensor,
    z_sum: Tensor,
    max_before_target: Tensor,
    target_logit: Tensor,
    vocab_start: int,
    n_cols: int,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    inv_t: float = 1.0,
    **flags: Any,
) -> None:
    """Fold one tile (rows, columns) into the running maximum and sums of each row."""
    options = flags | {"logit_scale": logit_scale, "inv_t": inv_t}
    for i, target in enumerate(targets.tolist()):
        x = _scaled(tile[i], n_cols, options)
        if vocab_start <= target < vocab_start + n_cols:
            target_logit[i] = x[target - vocab_start]
        new_max = torch.maximum(running_max[i], x.max())
        rescale = (running_max[i] - new_max).exp()
        weights = (x - new_max).exp_()
        sum_exp[i] = sum_exp[i] * rescale + weights.sum()
        if flags["HAS_ENTROPY"]:
            x_sum_exp[i] = x_sum_exp[i] * rescale + (weights @ x)
        running_max[i] = new_max


@torch.no_grad()
def backward_tile(
    tile: Tensor,
    tile_stride: int,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    vocab_start: int,
    n_cols: int,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    inv_t: float = 1.0,
    **flags: Any,
) -> None:
    """Replace one tile of logits by the gradient of the logits."""
    options = flags | {"logit_scale": logit_scale, "inv_t": inv_t}
    for i, target in enumerate(targets.tolist()):
        x = _scaled(tile[i], n_cols, options).sub_(log_z[i])
        p = x.exp()
        gradient = torch.zeros_like(p)
        if flags.get("HAS_LOGPROB_GRAD", True):
            gradient.sub_(p * grad_logprobs[i])
            if vocab_start <= target < vocab_start + n_cols:
                gradient[target - vocab_start] += grad_logprobs[i]
        if flags["HAS_ENTROPY_GRAD"]:
            gradient.sub_(x.add_(entropy[i]).mul_(p).mul_(grad_entropy[i]))
        tile[i, :n_cols] = gradient.mul_(logit_scale * inv_t)
