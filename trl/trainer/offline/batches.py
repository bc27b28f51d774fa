"""Prepared preferences, and predictions by row."""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import chain
from operator import itemgetter

import numpy as np
from datasets import Dataset, IterableDataset
from torch import Tensor

from ...batch import Batch
from ...data.cutting import Cut
from ...data.encode import TextEncoder
from ...data.preference_cutting import PreferenceLimits, cut_preferences
from ...data.preference_rows import ANYONE, OLD_NAMES, Learner, prepare_preferences
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
        # Of each group: its row, whether its answer is undesirable, and values by name.
        self._groups: list[tuple[int, bool, dict[str, list[float]]]] = []

    def add(self, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """Take values (G, K) of the answers of a batch, by name."""
        columns = {name: column.detach().tolist() for name, column in values.items()}
        undesirable = [False] * len(batch.groups)
        if "label" in batch.columns:
            undesirable = (~batch.columns["label"][batch.branch_rows(0)]).tolist()
        for index, group in enumerate(batch.groups):
            if not group.is_filler:
                count = len(group.branches)
                of_group = {name: column[index][:count] for name, column in columns.items()}
                self._groups.append((group.row, undesirable[index], of_group))

    def table(self, ranks: Ranks, rows: int | None) -> dict[str, np.ndarray]:
        """All values (rows, K) by name; NaN for rows that were left out, and missing answers.

        Each of the `ranks` has a share. `rows` are those of the dataset; None: all that are known.
        """
        shares = ranks.gather_objects(self._groups)[:: ranks.per_row]
        columns: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        # The desirable answer of a pair first.
        for source, _, of_group in sorted(chain(*shares), key=itemgetter(0, 1)):
            for name, numbers in of_group.items():
                columns[name][source] += numbers
        count = rows or max((source + 1 for source, *_ in chain(*shares)), default=0)
        return {
            name: pad_ragged([by_row[row] for row in range(count)], np.nan).numpy()
            for name, by_row in columns.items()
        }
