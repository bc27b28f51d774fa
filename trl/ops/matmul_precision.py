"""The precision of products of float32 matrices, a setting of the whole process.

torch has two settings for it, an old one for all devices and newer ones by device. Reading the old
one is an error while the newer ones differ, as after `tf32=True`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def matmul_precision_kept() -> Iterator[None]:
    """Restore the settings afterwards, whatever is changed inside."""
    try:
        for_all: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # newer settings differ
        for_all = None
    by_device = [(device, device.fp32_precision) for device in _devices()]
    try:
        yield
    finally:
        if for_all is not None:
            torch.set_float32_matmul_precision(for_all)
        for device, precision in by_device:
            device.fp32_precision = "none"  # take over that of all operations
            if device.fp32_precision != precision:
                device.fp32_precision = precision


@contextmanager
def highest_matmul_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside, without TF32 or bfloat16."""
    with matmul_precision_kept():
        torch.set_float32_matmul_precision("highest")  # of all devices, and consistently
        yield


def _devices() -> list[Any]:
    """Where torch has settings for products of single devices."""
    devices = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [device for device in devices if hasattr(device, "fp32_precision")]
