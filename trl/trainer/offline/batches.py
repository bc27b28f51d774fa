"""Prepared preferences, and predictions by row."""

import warnings
from collections import defaultdict
from functools import partial
from itertools import chain
from operator import itemgetter

import numpy as np
from datasets import Dataset, IterableDataset
from torch import Tensor

from ...data.cutting import Cut
from ...data.encode import TextEncoder
from ...data.preference_cutting import PreferenceLimits, cut_preferences
from ...data.preference_rows import ANYONE, OLD_NAMES, Learner, prepare_preferences
from ...data.rows import AnswerRows
from ...data.streams import PreparedStream
from ...distributed import Ranks
from ...ops.masking import pad_ragged
from .offline_config import OfflineConfig


def prepare_answers(
    dataset: Dataset | IterableDataset,
    encoder: TextEncoder,
    args: OfflineConfig,
    limits: PreferenceLimits,
    unpaired: bool = False,
    learner: Learner = ANYONE,
) -> Cut | PreparedStream:
    """Encode preferences and cut them to length."""
    if old := sorted(set(dataset.column_names or ()) & set(OLD_NAMES)):
        renamed = ", ".join(f"{name} is now {OLD_NAMES[name]}" for name in old)
        warnings.warn(f"Columns of the dataset: {renamed}.", FutureWarning, stacklevel=2)
    prepared = prepare_preferences(dataset, encoder, unpaired, args.dataset_num_proc, learner)
    cut = partial(cut_preferences, limits=limits, bounds=encoder.bounds)
    return PreparedStream(prepared, cut) if isinstance(prepared, IterableDataset) else cut(prepared)


class Predictions:
    """Values of answers, collected by the row of the dataset that they are of."""

    def __init__(self) -> None:
        self._found: list[tuple[int, bool, dict[str, list[float]]]] = []

    def add(self, rows: AnswerRows, values: dict[str, Tensor]) -> None:
        """Take values (B, K) of some rows, by name."""
        columns = {name: column.detach().tolist() for name, column in values.items()}
        for place, group in enumerate(rows.items):
            if group.counts:
                known = {n: column[place][: len(group.answer_ids)] for n, column in columns.items()}
                self._found.append((group.source, not group.values.get("label", True), known))

    def table(self, ranks: Ranks, rows: int | None) -> dict[str, np.ndarray]:
        """All values (rows, K) by name; NaN for rows that were left out, and missing answers.

        Each of the `ranks` has a share. `rows` are those of the dataset; None: all that are known.
        """
        shares = ranks.gather_objects(self._found)[:: ranks.per_row]
        columns: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        # The desirable answer of a pair first.
        for source, _, known in sorted(chain(*shares), key=itemgetter(0, 1)):
            for name, values in known.items():
                columns[name][source] += values
        count = rows or max((source + 1 for source, *_ in chain(*shares)), default=0)
        return {
            name: pad_ragged([by_row[row] for row in range(count)], np.nan).numpy()
            for name, by_row in columns.items()
        }
