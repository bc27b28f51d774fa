"""Detects NaN and infinity, and reports the rows that they came from."""

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
    """Records where values are not finite, without waiting for the device until `check`."""

    rank: int  # this process, for messages
    gather: Callable[[Any], list[Any]]  # the argument of every rank in rank order, on every rank
    _watched: list[tuple[str, Sequence[int], Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def watch(self, name: str, values: Tensor, rows: Rows, mask: Tensor | None = None) -> None:
        """Remember the rows of `values` (B, ...) that are not finite where `mask` is True.

        Messages call the values by the `name`.
        """
        is_bad = ~torch.isfinite(values)
        if mask is not None:
            is_bad = is_bad & mask
        self._watched.append((name, rows.row_ids, is_bad[:, None].flatten(1).any(1)))

    def check(self, step: int) -> None:
        """Raise `NonFiniteError` on every rank if any rank watched such a value.

        All ranks must call this.
        """
        reports = [report for report in self.gather(self.findings()) if report]
        if reports:
            raise NonFiniteError(f"Step {step}: {' '.join(reports)}")

    def reason(self, step: int) -> NonFiniteError:
        """Return an error that explains a gradient that is not finite; all ranks must call this."""
        try:
            self.check(step)
        except NonFiniteError as error:
            return error
        return NonFiniteError(
            f"Step {step}: the gradient is NaN or infinite on rank {self.rank}, though all "
            "log-probabilities are finite; check what weights the loss, such as advantages."
        )

    def findings(self) -> str:
        """Return messages about the watched rows of this rank, and clear them; "" if all is finite.

        This waits for the device.
        """
        messages = []
        for name, row_ids, is_bad in self._watched:
            rows = [row_ids[i] for i in is_bad.nonzero().flatten().tolist()]
            if rows:
                row_list = ", ".join(map(str, rows[:8]))
                if len(rows) > 8:
                    row_list += ", ..."
                messages.append(f"{name} of row {row_list} on rank {self.rank} is NaN or infinite.")
        self.forget()
        return " ".join(messages)

    def forget(self) -> None:
        """Discard everything watched so far, as after an update without such values."""
        self._watched.clear()
