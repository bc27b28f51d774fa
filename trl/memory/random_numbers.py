"""Save and restore the state of the global random number generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class TorchRngState:
    """The state of torch's generators, on the CPU and on all CUDA devices, when it was created."""

    def __init__(self) -> None:
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Set the generators back to this state."""
        torch.set_rng_state(self._cpu_state)
        torch.cuda.set_rng_state_all(self._cuda_states)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch on exit.

    Random numbers drawn inside the block do not change the numbers drawn after it.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = TorchRngState()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch_state.restore()
