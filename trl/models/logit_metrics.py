"""Users' metrics that need logits, which are made for one row of an evaluation at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from ..data.rows import IGNORED, SupervisedRows
from ..distributed import Ranks
from ..torch_internals import tree_map
from .lm_head import OutputHead
from .scorer import Hidden, Reader

OTHERS = ("batch_eval_metrics", "include_for_metrics")


@dataclass(frozen=True)
class LogitReader(Reader):
    """Hands the logits of what is predicted in each row to a function, a row at a time."""

    head: OutputHead | None  # None: the model's own logits are read, which takes plain rows
    use: Callable[[int, Tensor, Tensor], None]  # row, its completion tokens (m,), logits (m, V)

    def __call__(self, hidden: Hidden) -> tuple[None]:
        layout, head = hidden.layout, self.head
        rows, columns = layout.places // layout.shape[1], layout.places % layout.shape[1]
        entries = [(rows == row).nonzero()[:, 0] for row in range(layout.shape[0])]
        if head is None:
            logits = torch.as_tensor(hidden.logits)
            width = layout.inputs["input_ids"].shape[1]
            first = width - logits.shape[1]
            for row, mine in enumerate(entries):
                at = layout.sources[layout.slots[mine]]
                self.use(row, columns[mine], logits[at // width, at % width - first])
            return (None,)

        def read(states: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
            for row, mine in enumerate(entries):
                own = states[layout.slots[mine]]
                self.use(row, columns[mine], head.logits(own, hidden.capture.autocast, project))
            return states

        head.where_whole(read, hidden.at(layout.sources))
        return (None,)


class LogitMetrics:
    """Calls functions of users as `transformers.Trainer` does in an evaluation.

    `preprocess` is given logits (1, T, V) and labels (1, T) of one row; those of a token predict
    the next one, and what no trained token needs is 0. Labels are -100 where nothing is trained.
    What it returns, or logits, are joined to the predictions (rows, T, ...) that `compute` is
    given with labels (rows, T), both with -100 beyond the end of a row.
    """

    def __init__(self, args: Any, compute: Any, preprocess: Any):
        if compute is None:
            raise ValueError("preprocess_logits_for_metrics needs compute_metrics.")
        others = {name: getattr(args, name, 0) for name in OTHERS} | {
            "cp_size or sp_size": getattr(args, "ranks_per_row", 1) > 1
        }
        if found := [name for name, is_chosen in others.items() if is_chosen]:
            raise ValueError(f"compute_metrics cannot be used with {found[0]}. Leave one out.")
        self._compute: Callable[[EvalPrediction], dict[str, Any]] = compute
        self._preprocess: Callable[[Tensor, Tensor], Any] | None = preprocess
        self._rows: list[tuple[int, Any, Tensor]] = []  # of the evaluation that is running

    def reader(self, head: OutputHead | None, rows: SupervisedRows) -> LogitReader:
        """What takes the logits of a micro-batch."""

        def use(row: int, columns: Tensor, logits: Tensor) -> None:
            document = rows.items[row]
            if not document.counts:
                return
            size, start = len(document.ids), len(document.prompt_ids)
            whole = logits.new_zeros(1, size, logits.shape[1])
            whole[0, start - 1 + columns] = logits
            labels = torch.tensor([document["labels"]], device=logits.device)
            found = self._preprocess(whole, labels) if self._preprocess else whole
            self._rows.append((document.source, tree_map(_on_host, found), labels[0].cpu()))

        return LogitReader(head, use)

    def begin(self) -> None:
        """Forget the rows of an evaluation before, which may have been interrupted."""
        self._rows.clear()

    def result(self, ranks: Ranks) -> dict[str, Any]:
        """Metrics of the rows of all ranks, in the order of the dataset."""
        rows = sorted(chain(*ranks.gather_objects(self._rows)), key=itemgetter(0))
        self.begin()
        _, predictions, labels = zip(*rows, strict=True)
        return self._compute(EvalPrediction(tree_map(_joined, *predictions), _joined(*labels)))


def _on_host(found: Tensor) -> Tensor:
    values = found[0].detach().cpu()
    return values.float() if values.is_floating_point() else values


def _joined(*rows: Tensor) -> Any:
    if rows[0].ndim == 0:
        return torch.stack(rows).numpy()
    return pad_sequence(list(rows), batch_first=True, padding_value=IGNORED).numpy()
