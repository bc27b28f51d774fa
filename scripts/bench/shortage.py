"""Compare a trainer that recovers from running out of memory with one with small chunks.

Three processes train alike: one without a limit, one that may hold only a share of what the first
one held, and one without a limit whose phases begin with the pieces that the second one ended with.
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
from runs import Work, execute

SHARE = 0.6  # of the peak: what the second process may hold


class Trial:
    """Changes to a trainer of this project, besides measuring it.

    Args:
        trainer: of this project, if anything is asked for.
        asked: `room`, the bytes that training may hold beyond what is held at its start; `pieces`,
            the rows with which phases begin; `changes`, a file for what training changed.
    """

    def __init__(self, trainer: Any, asked: dict[str, Any]):
        self._trainer = trainer
        self._asked = asked
        self._before: dict[str, torch.Tensor] = {}
        self._limits = resource.getrlimit(resource.RLIMIT_DATA)
        if asked:
            torch.use_deterministic_algorithms(True, warn_only=True)
            self._before = self._weights()

    def begin(self) -> None:
        """Set chunk sizes and the memory limit, just before training."""
        for name, rows in self._asked.get("pieces", {}).items():
            self._trainer.phases.batches[name].size = rows
        if "room" in self._asked:
            limit(self._asked["room"], self._trainer.args.device)

    def end(self) -> dict[str, Any]:
        """Remove the limit; return how often each phase ran out of memory, and its final rows."""
        if not self._asked:
            return {}
        resource.setrlimit(resource.RLIMIT_DATA, self._limits)
        after = self._weights()
        changes = {name: value - self._before[name] for name, value in after.items()}
        torch.save(changes, self._asked["changes"])
        batches = self._trainer.phases.batches
        row_counts = {name: batches[name] for name in ("generation", "scoring", "training")}
        return {
            "failures": {name: piece.failures for name, piece in row_counts.items()},
            "pieces": {name: piece.size for name, piece in row_counts.items() if piece.size},
        }

    def _weights(self) -> dict[str, torch.Tensor]:
        named = self._trainer.model.named_parameters()
        return {name: weight.detach().float().cpu().clone() for name, weight in named}


def limit(room: int, device: torch.device) -> None:
    """Limit the memory of this process to `room` more bytes than it holds."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        most = torch.cuda.memory_allocated(device) + room
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
        return
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held_kib = next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmData:"))
    highest = resource.getrlimit(resource.RLIMIT_DATA)[1]  # left, so that `end` can go back
    resource.setrlimit(resource.RLIMIT_DATA, (held_kib * 1024 + room, highest))


def recovered(work: Work, share: float = SHARE) -> dict[str, Any]:
    """Run the three processes.

    Returns:
        The run under the limit, with `room` in bytes; `whole` and `small`, the peaks of the two
        others; and `difference`, the largest difference of weights to the third process over the
        largest change of a weight. Or a dictionary with `error`.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{number}.pt") for number in range(3)]
        whole = execute(work, trial={"changes": paths[0]})
        if "error" in whole:
            return whole
        room = int(share * whole["peak"])
        short = execute(work, trial={"changes": paths[1], "room": room})
        if "error" in short:
            return short
        small = execute(work, trial={"changes": paths[2], "pieces": short["pieces"]})
        if "error" in small:
            return small
        result = {"room": room, "whole": whole["peak"], "small": small["peak"]}
        return short | result | {"difference": difference(*map(torch.load, paths[1:]))}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two weight changes, relative to the largest change."""
    apart = max(float((a[name] - b[name]).abs().max()) for name in b)
    return apart / max(float(change.abs().max()) for change in b.values())
