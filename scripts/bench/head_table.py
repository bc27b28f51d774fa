"""The table of measurements of the bounded head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runs import spread_of
from tables import megabytes

HEADERS = ("tokens x hidden x vocabulary", "logits held", "time / full logits")
HEADERS += ("peak, MB", "full logits, MB", "full / bounded")
METHOD = """Forward and backward pass of log-probabilities in float32. Peaks do not include the
inputs and their gradients, which both ways must hold. Times are process time on a CPU and wall time
on a GPU; ratios are the median of alternating rounds, with their range. The device's default of
`logits_chunk_size` is marked.
"""


def lines(shape: Sequence[int], figures: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table rows of one shape, one for each number of logits held at once."""
    tokens, size, vocabulary = shape
    return [
        [
            f"{tokens:,} x {size:,} x {vocabulary:,}",
            f"{figure['chunk']:,}{' (default)' if figure['default'] else ''}",
            "{:.2f} ({:.2f} to {:.2f})".format(*spread_of(figure["ratios"])),
            megabytes(figure["peak"]),
            megabytes(figure["full_peak"]),
            f"{figure['full_peak'] / figure['peak']:.1f}",
        ]
        for figure in figures
    ]
