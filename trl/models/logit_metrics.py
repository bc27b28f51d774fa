"""Users' metrics that need logits, which are computed for one row of an evaluation at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from ..batch import Batch
from ..data.examples import IGNORED
from ..distributed import Ranks
from ..ops.torch_internals import tree_map
from .lm_head import OutputHead
from .readers import Hidden, Reader

if TYPE_CHECKING:
    from transformers import TrainingArguments

UNSUPPORTED_OPTIONS = ("batch_eval_metrics", "include_for_metrics")
ComputeMetrics = Callable[[EvalPrediction], dict[str, Any]]
PreprocessLogits = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class LogitReader(Reader):
    """Passes the logits of each row's predictions to a function, one row at a time."""

    head: OutputHead | None  # None: the model's own logits are read, which needs plain rows
    # Called with the row, the columns (m,) of its predicted tokens, and their logits (m, V).
    receive: Callable[[int, Tensor, Tensor], None]

    def __call__(self, hidden: Hidden) -> tuple[None]:
        """Pass the logits on; there is nothing to return."""
        layout = hidden.layout
        head = self.head
        num_rows, width = layout.shape
        rows = layout.cells // width
        columns = layout.cells % width
        cells_of_rows = [(rows == row).nonzero()[:, 0] for row in range(num_rows)]
        if head is None:
            logits = hidden.last_logits()
            input_width = layout.inputs["input_ids"].shape[1]
            first = input_width - logits.shape[1]
            for row, cells in enumerate(cells_of_rows):
                sources = layout.sources[layout.predictions[cells]]
                row_logits = logits[sources // input_width, sources % input_width - first]
                self.receive(row, columns[cells], row_logits)
            return (None,)

        def read(states: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
            for row, cells in enumerate(cells_of_rows):
                row_states = states[layout.predictions[cells]]
                row_logits = head.logits(row_states, hidden.capture.autocast, project)
                self.receive(row, columns[cells], row_logits)
            return states

        head.where_whole(read, hidden.at(layout.sources))
        return (None,)


class LogitMetrics:
    """Calls users' metric functions as `transformers.Trainer` does in an evaluation.

    `preprocess` gets logits (1, T, V) and labels (1, T) of one row. The logits at a token predict
    the next token; they are 0 where no target token needs them. Labels are -100 except at target
    tokens; a row ends with its last one. What `preprocess` returns (by default the logits) is
    joined to predictions (rows, T, ...). `compute` gets these with labels (rows, T), both padded
    with -100.
    """

    def __init__(
        self,
        args: "TrainingArguments",
        compute: ComputeMetrics | None,
        preprocess: PreprocessLogits | None,
    ):
        if compute is None:
            raise ValueError("preprocess_logits_for_metrics needs compute_metrics.")
        options = [name for name in UNSUPPORTED_OPTIONS if vars(args).get(name)]
        if getattr(args, "ranks_per_row", 1) > 1:
            options.append("cp_size or sp_size")
        if options:
            raise ValueError(f"compute_metrics cannot be used with {options[0]}. Leave one out.")
        self._compute = compute
        self._preprocess = preprocess
        # Of the evaluation that is running: (index in the dataset, predictions, labels).
        self._rows: list[tuple[int, Any, Tensor]] = []

    def reader(self, head: OutputHead | None, batch: Batch) -> LogitReader:
        """Make a reader that collects the predictions of a micro-batch of documents."""

        def receive(row: int, columns: Tensor, logits: Tensor) -> None:
            group = batch.groups[row]
            if group.is_filler:
                return
            (branch,) = group.branches
            start = len(group.prefix)
            padded = logits.new_zeros(1, start + len(branch.ids), logits.shape[1])
            padded[0, start - 1 + columns] = logits
            labels = torch.full((1, start + len(branch.ids)), IGNORED, device=logits.device)
            ids = torch.tensor(branch.ids, device=logits.device)
            in_loss = batch.loss_mask[row, : len(ids)]
            labels[0, start:] = torch.where(in_loss, ids, IGNORED)
            predictions = self._preprocess(padded, labels) if self._preprocess else padded
            self._rows.append((group.row, tree_map(_on_host, predictions), labels[0].cpu()))

        return LogitReader(head, receive)

    def begin(self) -> None:
        """Drop the rows of an earlier evaluation, which may have been interrupted."""
        self._rows.clear()

    def result(self, ranks: Ranks) -> dict[str, Any]:
        """Compute the metrics of the rows of all ranks, in the order of the dataset."""
        rows = sorted(chain(*ranks.gather_objects(self._rows)), key=itemgetter(0))
        self.begin()
        _, predictions, labels = zip(*rows, strict=True)
        return self._compute(EvalPrediction(tree_map(_joined, *predictions), _joined(*labels)))


def _on_host(values: Tensor) -> Tensor:
    values = values[0].detach().cpu()
    return values.float() if values.is_floating_point() else values


def _joined(*rows: Tensor) -> np.ndarray:
    """Join the rows of an evaluation to one array, padded with -100."""
    if rows[0].ndim == 0:
        joined = torch.stack(rows)
    else:
        joined = pad_sequence(list(rows), batch_first=True, padding_value=IGNORED)
    array: np.ndarray = joined.numpy()
    return array
