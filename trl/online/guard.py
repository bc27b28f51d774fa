"""NaN and infinity are errors that name where they came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..types import Rows


class NonFiniteError(RuntimeError):
    """A value that training depends on is NaN or infinite."""


@dataclass
class FiniteGuard:
    """Watches values without waiting for the device; looks at them when an update is due."""

    rank: int  # this process, for messages
    gather: Callable[[Any], list[Any]]  # the argument of every rank in rank order, on every rank
    _watched: list[tuple[str, Sequence[int], Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def watch(self, what: str, values: Tensor, rows: Rows, mask: Tensor | None = None) -> None:
        """Remember which rows of `values` (B, ...), called `what`, are not finite in the `mask`."""
        bad = ~torch.isfinite(values)
        bad = (bad if mask is None else bad & mask)[:, None].flatten(1).any(1)
        self._watched.append((what, rows.row_ids, bad))

    def check(self, step: int) -> None:
        """Raise `NonFiniteError` on every rank if one saw such a value; all must call this."""
        reports = [report for report in self.gather(self.findings()) if report]
        if reports:
            raise NonFiniteError(f"Step {step}: {' '.join(reports)}")

    def reason(self, step: int) -> NonFiniteError:
        """Say why a gradient is not finite; every rank must call this."""
        try:
            self.check(step)
        except NonFiniteError as error:
            return error
        return NonFiniteError(
            f"Step {step}: the gradient is NaN or infinite on rank {self.rank}, though all "
            "log-probabilities are finite; check what weights the loss, such as advantages."
        )

    def findings(self) -> str:
        """Describe what is bad on this rank, and forget it; empty if all is finite."""
        words = []
        for what, row_ids, bad in self._watched:
            rows = [row_ids[i] for i in bad.nonzero().flatten().tolist()]
            if rows:
                shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
                words.append(f"{what} of row {shown} on rank {self.rank} is NaN or infinite.")
        self.forget()
        return " ".join(words)

    def forget(self) -> None:
        """Drop what was watched, after an update that went well."""
        self._watched.clear()
