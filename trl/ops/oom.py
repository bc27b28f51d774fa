"""Recognize out-of-memory errors."""

import re

import torch

_MESSAGES = re.compile(
    r"(CUDA|HIP|XPU|MPS)( backend| error:| driver error:)? out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that an allocation failed, on a device or on the host.

    True for `MemoryError`, `torch.OutOfMemoryError`, and a `RuntimeError` with an out-of-memory
    message of an allocator, a driver, cuBLAS or cuDNN. False for every other error.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))
