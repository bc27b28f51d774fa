import torch

from trl.ops.oom import is_out_of_memory


def real_errors():
    """Errors of allocators on this machine."""
    for size in (1 << 50, 1 << 55):
        try:
            torch.empty(size)
        except RuntimeError as error:
            yield error
    try:
        bytearray(1 << 55)
    except MemoryError as error:
        yield error


def test_allocator_errors_are_told_from_others():
    real = list(real_errors())
    assert len(real) == 3
    messages = [
        "CUDA out of memory. Tried to allocate 20.00 MiB.",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "HIP out of memory. Tried to allocate 2 GiB",
        "MPS backend out of memory (MPS allocated: 9 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: not enough memory: you tried",
    ]
    for error in [*real, torch.OutOfMemoryError("x"), *map(RuntimeError, messages)]:
        assert is_out_of_memory(error), error
    others = [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        RuntimeError("the reward server is out of memory"),
        ValueError("CUDA out of memory"),
        KeyboardInterrupt(),
        OSError("No space left on device"),
    ]
    for error in others:
        assert not is_out_of_memory(error), error
