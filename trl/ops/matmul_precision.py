"""The precision of float32 matrix products, which torch keeps as a process-wide setting.

torch has an old setting for all devices and newer settings for each device. Reading the old one
raises an error while the newer ones differ, as they do after `tf32=True`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def matmul_precision_kept() -> Iterator[None]:
    """Restore the settings on exit, whatever the block changes."""
    try:
        for_all: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # the settings of devices differ
        for_all = None
    by_device = [(device, device.fp32_precision) for device in _devices()]
    try:
        yield
    finally:
        if for_all is not None:
            torch.set_float32_matmul_precision(for_all)
        for device, precision in by_device:
            device.fp32_precision = "none"  # inherits the precision of all operations
            if device.fp32_precision != precision:
                device.fp32_precision = precision


@contextmanager
def highest_matmul_precision() -> Iterator[None]:
    """Multiply float32 matrices in full float32 inside, without TF32 or bfloat16."""
    with matmul_precision_kept():
        torch.set_float32_matmul_precision("highest")  # sets the newer settings, too
        yield


def _devices() -> list[Any]:
    """The objects on which torch keeps the settings of single devices."""
    devices = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [device for device in devices if hasattr(device, "fp32_precision")]
