"""An attention kernel with a fault, as a broken one of a device would have."""

import torch

from trl.models import packed_attention as shared_attention
from trl.ops.attention_kernels import CpuFlash

GRADIENTS = ("query", "key", "value")
FAULTS = ("causality", "normalizer", "scale", "NaN", *GRADIENTS)


class Faulty(CpuFlash):
    """Wrong in some precisions only, by too little for every token to show it."""

    def __init__(self, fault, dtypes):
        self._fault, self._dtypes = fault, dtypes

    def _is(self, fault, tensor):
        return self._fault == fault and tensor.dtype in self._dtypes

    def forward(self, part, causal, scale):
        query = part[0]
        if self._is("error", query):
            raise RuntimeError("no kernel image is available")
        causal = causal and not self._is("causality", query)
        scale = 1.05 * scale if self._is("scale", query) else scale
        output, normalizer = super().forward(part, causal, scale)
        normalizer = normalizer + 0.1 if self._is("normalizer", query) else normalizer
        return output * torch.nan if self._is("NaN", query) else output, normalizer

    def backward(self, grad, saved, causal, scale):
        found = super().backward(grad, saved, causal, scale)
        wrong = [self._is(name, grad) for name in GRADIENTS]
        return tuple(x * 1.03 if bad else x for x, bad in zip(found, wrong, strict=True))


def break_kernels(monkeypatch, fault, *dtypes):
    """Give all attention a fault in these precisions."""
    monkeypatch.setattr(shared_attention, "choose_kernel", lambda *_: Faulty(fault, dtypes))
