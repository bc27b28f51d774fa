"""Lets matrix products round as on processors where rounding depends on shapes and alignment.

`install()`, or `TRL_TEST_ALIGNMENT=1` for all tests: a float32 or float64 product on the CPU is
then off by up to one unit in the last place, as its inputs' shapes, strides and addresses (modulo
64 bytes) decide. The same computation at an equally aligned place gives the same bits, any other
one does not. So it is with MKL on AMD processors, and with a shared prefix against plain rows
on all machines. A test that fails only there compares bits where it should have a bound.

Level 2 is stricter than any machine: each tensor is taken to lie elsewhere, so that no two products
of a process agree. It lists what relies on the order of computations.
"""

import os
import zlib
from functools import partial

import torch

PERIOD = 61  # of the pattern of errors; odd and prime, so that it fits no width of a layer
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # factors' places


class Rounding:
    """Replaces kernels for the rest of the process; holds what must live as long as they do."""

    def __init__(self, level: int):
        self.library = torch.library.Library("aten", "IMPL")
        self.level, self.calls = level, 0
        for name, places in PRODUCTS.items():
            self.library.impl(name, partial(self.product, name, places), "CPU")

    def product(self, name, places, *args, **kwargs):
        # The variant that writes into `out` is another operator, and its kernel the exact one.
        first, second = (args[place] for place in places)
        out = first.new_empty(*first.shape[:-1], second.shape[-1])
        getattr(torch.ops.aten, name).out(*args, **kwargs, out=out)
        return self.with_errors(out, (first, second))

    def with_errors(self, result, factors):
        if result.dtype not in (torch.float32, torch.float64) or not result.numel():
            return result
        self.calls += self.level > 1
        place = [(x.shape, x.stride(), x.data_ptr() % 64) for x in factors]
        start = zlib.crc32(repr((place, self.calls)).encode()) % PERIOD
        signs = torch.arange(start, start + result.numel()).remainder_(PERIOD).remainder_(3) - 1
        return result * (1 + signs.view(result.shape) * torch.finfo(result.dtype).eps)


_installed: list[Rounding] = []


def slack() -> int:
    """What to multiply bounds by: here each product is off by a unit more than on a machine."""
    return 2 if _installed else 1


def install(level: int = 1) -> None:
    """Let all products of this process, and of those forked from it, round so from now on."""
    if level and not _installed:
        _installed.append(Rounding(level))


install(int(os.environ.get("TRL_TEST_ALIGNMENT", "0")))
