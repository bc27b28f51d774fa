"""What no option of a trainer asks for: passes over few tokens, junk in padding, silenced rows."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import cases
import one_row
import torch
from cases import LOSSES
from tiny import tiny_tokenizer
from torch import Tensor, nn

from trl.batch import Batch
from trl.models import packed_layout as passes
from trl.models import scorer
from trl.models.packed_layout import Layout, plain_layout
from trl.types import Rows, TokenScores

SHORTEST_PASS = 12  # tokens, where it is thousands else


@contextmanager
def conditions(in_passes: bool, junk: bool) -> Iterator[None]:
    """Cut short forwards into passes as if they were long, and fill padding with any tokens."""
    with ExitStack() as stack:
        if in_passes:
            # Passes cost as much memory as the gradients, which these forwards would not be worth.
            changes = {"SHORTEST_PASS": SHORTEST_PASS, "SHORTEST_TAIL_PASS": SHORTEST_PASS}
            stack.enter_context(patch.multiple(passes, gradient_bytes=lambda causal: 0, **changes))
        if junk:
            stack.enter_context(patch.object(scorer, "plain_layout", layout_with_junk))
        yield


def layout_with_junk(
    batch: Rows, pad_id: int, device: torch.device, multiple: int | None = None
) -> Layout:
    """Plain rows with random tokens in the padding, the end and padding tokens among them."""
    layout = plain_layout(batch, pad_id, device, multiple)
    ids = layout.inputs["input_ids"]
    generator = torch.Generator().manual_seed(len(batch))
    filled = torch.randint(len(tiny_tokenizer()), ids.shape, generator=generator)
    pairs = zip(batch.prompt_ids, batch.completion_ids, strict=True)
    for row, (prompt, completion) in enumerate(pairs):
        length = len(prompt) + len(completion)
        filled[row, :length] = ids[row, :length]
    inputs = layout.inputs | {"input_ids": filled}
    return replace(layout, inputs=inputs)


def silence(trainer: Any, loss: str, single_zeros: bool, with_signal: bool) -> None:
    """Cut off the gradient of the rows with (or else of those without) an advantage.

    What is left is what the other rows add to the gradient, in the same forward and backward.
    """
    signals = rows_with_signal(loss, single_zeros)
    score = trainer.scoring.score

    def score_silently(model: nn.Module, batch: Batch, *others: Any) -> TokenScores:
        scores: TokenScores = score(model, batch, *others)
        rows = zip(batch.rows.prompt_ids, batch.rows.completion_ids, strict=True)
        silent = [((tuple(prompt), tuple(ids)) in signals) == with_signal for prompt, ids in rows]
        columns = torch.tensor(silent)[:, None]

        def cut(grad: Tensor) -> Tensor:
            return grad.masked_fill(columns, 0.0)

        scores.logps.register_hook(cut)
        return scores

    trainer.scoring.score = score_silently


def rows_with_signal(loss: str, single_zeros: bool) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts and completions whose advantage is not 0, by definition."""
    found = set()
    for group in cases.groups(single_zeros):
        credit = one_row.advantages(LOSSES[loss], group, one_row.Known())
        found |= {
            (row.prompt, row.completion)
            for row, value in zip(group, credit, strict=True)
            if value != 0.0
        }
    return found
