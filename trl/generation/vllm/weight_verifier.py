"""Proof that an engine holds the weights it was sent.

An engine may cut a weight, fuse it with others or convert it. So the copies that loading makes are
watched once for each weight; from then on the parts of what is sent and the places they belong to
are known, and their fingerprints must agree after every sync.
"""

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import TorchDispatchMode

CHUNK = 2**20  # words that a fingerprint looks at together; 8 MB stay for their factors
ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, as a signed number

Source = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides and offset in a weight


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights of the policy."""


def fingerprint(values: Tensor) -> Tensor:
    """A number, as an integer (), that tells tensors of the same type and size apart.

    It is a sum of words of eight bytes, each times an odd number that depends on its place, in
    integers modulo 2**64. So it is exact, whatever the device and the number of threads: a tensor
    in which one bit differs has another, and a transposed or permuted one too.
    """
    # The copy of what does not fill the last word, or does not begin at one, is of few bytes.
    flat = values.detach().reshape(-1).contiguous().view(torch.uint8)
    whole = len(flat) // 8 * 8
    head, tail = flat[:whole], torch.nn.functional.pad(flat[whole:], (0, 8 - len(flat) + whole))
    if head.storage_offset() % 8:
        head = head.clone()
    total = tail.clone().view(torch.int64)[0]
    factors = _factors(flat.device)
    for part in head.view(torch.int64).split(CHUNK):
        total = total * ODD + (part * factors[: len(part)]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(CHUNK, device=device) * ODD | 1


@dataclass(frozen=True)
class WeightCopy:
    """Where a part of a weight goes."""

    source: Source | None  # of the part in the weight; None if it was converted
    target: Tensor  # the part of a parameter of the engine

    def part(self, weight: Tensor) -> Tensor | None:
        """The part of another value of the weight, as the engine would hold it."""
        if self.source is None:
            return None
        size, stride, offset = self.source
        part = weight.as_strided(size, stride, weight.storage_offset() + offset)
        return part.to(self.target.dtype).expand(self.target.shape)


class CopyWatch(TorchDispatchMode):
    """Notes what loading a weight writes to storages, named by their addresses."""

    def __init__(self, storages: set[int], weight: Tensor):
        super().__init__()
        self._storages = storages
        self._weight = weight
        self.places: list[WeightCopy] = []
        self.targets: list[Tensor] = []  # of the places, and what is filled with a number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note it if it writes."""
        writes = func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar)
        if writes and args[0].untyped_storage().data_ptr() in self._storages:
            self.targets.append(args[0].detach())
            if func is torch.ops.aten.copy_.default:
                self.places.append(WeightCopy(self._source(args[1]), self.targets[-1]))
        return func(*args, **(kwargs or {}))

    def _source(self, part: Tensor) -> Source | None:
        weight = self._weight
        same = part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        if not same or part.dtype != weight.dtype:
            return None
        offset = part.storage_offset() - weight.storage_offset()
        return tuple(part.shape), tuple(part.stride()), offset


class WeightVerifier:
    """Loads weights into an engine's model, and proves that all its parameters arrived."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._places: dict[str, list[WeightCopy]] = {}
        # Of each part of a weight its fingerprint; None if the engine converts it.
        self._sent: dict[str, list[Tensor | None]] = {}
        self._covered: dict[int, set[tuple[Any, ...]]] = {}
        self.unproven: list[str] = []  # weights that the engine converts while loading

    def load(self, name: str, weight: Tensor, load: Callable[[str, Tensor], None]) -> None:
        """Load one weight by calling `load(name, weight)`, and note what the engine must hold."""
        if name in self._places:
            load(name, weight)
        else:
            with CopyWatch(set(self._held()), weight) as watch:
                load(name, weight)
            self._places[name] = watch.places
            for target in watch.targets:
                where = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
                self._covered.setdefault(target.untyped_storage().data_ptr(), set()).add(where)
            if any(place.source is None for place in watch.places):
                self.unproven.append(name)
        parts = [place.part(weight) for place in self._places[name]]
        self._sent[name] = [None if part is None else fingerprint(part) for part in parts]

    @property
    def doubt(self) -> str | None:
        """What is not proven, in words; None if all is."""
        if not self.unproven:
            return None
        return (
            f"vLLM converts {len(self.unproven)} weights while loading, such as "
            f"{self.unproven[0]}; only log-probabilities prove that they arrived."
        )

    def _held(self) -> dict[int, tuple[str, Tensor]]:
        named = self._model.named_parameters()
        return {p.untyped_storage().data_ptr(): (name, p) for name, p in named}

    def problem(self) -> str | None:
        """What is wrong after a sync, in words, if anything; forgets what was sent."""
        sent, self._sent = self._sent, {}
        found = self._missing(sent) or self._different(sent)
        if found is not None:
            # What was learned from a sync that failed is not relied on.
            self._places.clear()
            self._covered.clear()
        return found

    def _missing(self, sent: Collection[str]) -> str | None:
        skipped = [name for name in self._places if name not in sent]
        if skipped:
            return f"{_listed(skipped)} not sent, unlike at earlier syncs"
        for address, (name, parameter) in self._held().items():
            covered = sum(math.prod(shape) for _, shape, _ in self._covered.get(address, ()))
            if covered < parameter.numel():
                return (
                    f"{parameter.numel() - covered} of {parameter.numel()} entries of the engine's "
                    f"{name} were not loaded"
                )
        return None

    def _different(self, sent: dict[str, list[Tensor | None]]) -> str | None:
        names, same = [], []
        for name, fingerprints in sent.items():
            for place, expected in zip(self._places[name], fingerprints, strict=True):
                if expected is not None:
                    names.append(name)
                    same.append(fingerprint(place.target) == expected)
        found = torch.stack(same).tolist() if same else []  # waits for the device once
        wrong = [name for name, is_same in zip(names, found, strict=True) if not is_same]
        return f"{_listed(wrong)} not what was sent" if wrong else None


def _listed(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - 3} more" if len(unique) > 3 else ""
    return f"{', '.join(unique[:3])}{more} {'was' if len(unique) == 1 else 'were'}"
