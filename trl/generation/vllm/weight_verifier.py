"""Verification that an engine holds the weights that were sent to it.

An engine may slice a weight, fuse it with others or convert it. So the copies that loading makes
are recorded the first time a weight is loaded. From then on it is known which slice of the weight
belongs where, and after every sync the fingerprints of both must be equal.
"""

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.torch_internals import TorchDispatchMode

CHUNK_WORDS = 2**20  # words of 8 bytes that a fingerprint reads at once; bounds temporary memory
ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, as a signed number


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights of the policy."""


def fingerprint(values: Tensor) -> Tensor:
    """Return a checksum () of a tensor's bytes, which changes with any bit and with their order.

    It is the sum of all words of 8 bytes, each multiplied by an odd number that depends on its
    index, modulo 2**64. Integer sums are exact, so the device and the number of threads do not
    matter.
    """
    # Only the few bytes of an incomplete last word, or a tensor that is not aligned, are copied.
    flat = values.detach().reshape(-1).contiguous().view(torch.uint8)
    whole = len(flat) // 8 * 8
    full_words = flat[:whole]
    if full_words.storage_offset() % 8:
        full_words = full_words.clone()
    last_word = torch.nn.functional.pad(flat[whole:], (0, 8 - len(flat) + whole))
    total = last_word.clone().view(torch.int64)[0]
    factors = _factors(flat.device)
    for chunk in full_words.view(torch.int64).split(CHUNK_WORDS):
        total = total * ODD + (chunk * factors[: len(chunk)]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(CHUNK_WORDS, device=device) * ODD | 1


@dataclass(frozen=True)
class WeightSlice:
    """A strided slice of a weight."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the first one of the weight

    def of(self, weight: Tensor) -> Tensor:
        """Return the slice of another value of the weight."""
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


@dataclass(frozen=True)
class WeightCopy:
    """A copy that loading a weight makes: from a slice of it to a part of a parameter."""

    source: WeightSlice | None  # None: the weight was converted before
    target: Tensor  # a view of an engine's parameter

    def expected(self, weight: Tensor) -> Tensor | None:
        """Return what the target must hold after loading another value; None: unknown."""
        if self.source is None:
            return None
        return self.source.of(weight).to(self.target.dtype).expand(self.target.shape)


class CopyRecorder(TorchDispatchMode):
    """Records what loading a weight writes to some storages, given by their addresses."""

    def __init__(self, storages: set[int], weight: Tensor):
        super().__init__()
        self._storages = storages
        self._weight = weight
        self.copies: list[WeightCopy] = []
        self.written: list[Tensor] = []  # targets of copies, and what was filled with a constant

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run the operation, and record it if it is a copy or fill."""
        is_copy = func is torch.ops.aten.copy_.default
        is_fill = func is torch.ops.aten.fill_.Scalar
        if (is_copy or is_fill) and args[0].untyped_storage().data_ptr() in self._storages:
            target = args[0].detach()
            self.written.append(target)
            if is_copy:
                self.copies.append(WeightCopy(self._slice_of_weight(args[1]), target))
        return func(*args, **(kwargs or {}))

    def _slice_of_weight(self, values: Tensor) -> WeightSlice | None:
        """Return which slice of the weight `values` is; None if it is another tensor."""
        weight = self._weight
        is_view = values.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        if not is_view or values.dtype != weight.dtype:
            return None
        offset = values.storage_offset() - weight.storage_offset()
        return WeightSlice(tuple(values.shape), tuple(values.stride()), offset)


class WeightVerifier:
    """Loads weights into an engine's model, and verifies that all its parameters hold them."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._copies: dict[str, list[WeightCopy]] = {}  # by name of the weight
        # Expected fingerprints of the targets of a weight's copies in this sync; None if the engine
        # converts the weight.
        self._expected: dict[str, list[Tensor | None]] = {}
        # Offset, size and stride of all parts of a storage that were written, by its address.
        self._written: dict[int, set[tuple[Any, ...]]] = {}
        self.unverified: list[str] = []  # weights that the engine converts while loading

    def load(self, name: str, weight: Tensor, load: Callable[[str, Tensor], None]) -> None:
        """Load a weight by calling `load(name, weight)`, and note what the engine must hold."""
        if name in self._copies:
            load(name, weight)
        else:
            with CopyRecorder(set(self._parameters()), weight) as recorder:
                load(name, weight)
            self._copies[name] = recorder.copies
            for target in recorder.written:
                part = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
                self._written.setdefault(target.untyped_storage().data_ptr(), set()).add(part)
            if any(copy.source is None for copy in recorder.copies):
                self.unverified.append(name)
        expected = [copy.expected(weight) for copy in self._copies[name]]
        self._expected[name] = [
            None if values is None else fingerprint(values) for values in expected
        ]

    @property
    def warning(self) -> str | None:
        """A warning if some weights cannot be verified, else None."""
        if not self.unverified:
            return None
        return (
            f"vLLM converts {len(self.unverified)} weights while loading, such as "
            f"{self.unverified[0]}; only the comparison of log-probabilities can show that they "
            "arrived."
        )

    def _parameters(self) -> dict[int, tuple[str, Tensor]]:
        """Return names and parameters of the engine by the address of their storage."""
        return {
            parameter.untyped_storage().data_ptr(): (name, parameter)
            for name, parameter in self._model.named_parameters()
        }

    def finish_sync(self) -> str | None:
        """Verify the weights loaded since the last call; return an error text, or None."""
        expected = self._expected
        self._expected = {}
        problem = self._missing(expected) or self._different(expected)
        if problem is not None:
            # The copies recorded in a failed sync may be wrong.
            self._copies.clear()
            self._written.clear()
        return problem

    def _missing(self, loaded: Collection[str]) -> str | None:
        """Return an error text if a weight was not sent or a parameter not completely written."""
        skipped = [name for name in self._copies if name not in loaded]
        if skipped:
            verb = "was" if len(skipped) == 1 else "were"
            return f"{_enumerate(skipped)} {verb} not sent, unlike at earlier syncs"
        for address, (name, parameter) in self._parameters().items():
            parts = self._written.get(address, ())
            num_written = sum(math.prod(shape) for _, shape, _ in parts)
            if num_written < parameter.numel():
                return (
                    f"{parameter.numel() - num_written} of {parameter.numel()} entries of the "
                    f"engine's {name} were not loaded"
                )
        return None

    def _different(self, expected: dict[str, list[Tensor | None]]) -> str | None:
        """Return an error text if a parameter does not hold what was sent."""
        names = []
        are_equal = []
        for name, fingerprints in expected.items():
            for copy, expected_fingerprint in zip(self._copies[name], fingerprints, strict=True):
                if expected_fingerprint is not None:
                    names.append(name)
                    are_equal.append(fingerprint(copy.target) == expected_fingerprint)
        if not are_equal:
            return None
        flags = torch.stack(are_equal).tolist()  # waits for the device once
        pairs = zip(names, flags, strict=True)
        wrong = list(dict.fromkeys(name for name, is_equal in pairs if not is_equal))
        if not wrong:
            return None
        verb = "differs" if len(wrong) == 1 else "differ"
        return f"{_enumerate(wrong)} {verb} from what was sent"


def _enumerate(names: list[str]) -> str:
    """Return the first three names and the number of others, such as "a, b, c and 2 more"."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text
