"""The state of the global random numbers, kept and restored."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class RandomState:
    """The state of torch's random numbers at a point."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Go back to that point."""
        torch.set_rng_state(self._cpu)
        torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """What is drawn inside, of Python, NumPy and torch, does not change what is drawn later."""
    python, numpy, tensors = random.getstate(), np.random.get_state(), RandomState()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        tensors.restore()
