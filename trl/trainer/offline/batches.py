"""Prepares preference datasets, and collects the values that `predict` returns."""

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
    """Collects values of answers by the dataset row of their prompt."""

    def __init__(self) -> None:
        # For each group: its row, whether its answer is undesirable, and values by name.
        self._groups: list[tuple[int, bool, dict[str, list[float]]]] = []

    def add(self, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """Add values (G, K) of the answers of a batch, by name."""
        columns = {name: column.detach().tolist() for name, column in values.items()}
        undesirable = [False] * len(batch.groups)
        if "label" in batch.columns:
            undesirable = (~batch.columns["label"][batch.branch_rows(0)]).tolist()
        for index, group in enumerate(batch.groups):
            if not group.is_filler:
                count = len(group.branches)
                group_values = {name: column[index][:count] for name, column in columns.items()}
                self._groups.append((group.row, undesirable[index], group_values))

    def table(self, ranks: Ranks, rows: int | None) -> dict[str, np.ndarray]:
        """Return the values (rows, K) of all ranks by name; NaN for missing rows and answers.

        `rows` is the number of rows of the dataset; None: one more than the highest row added.
        """
        rank_groups = ranks.gather_objects(self._groups)[:: ranks.per_row]
        groups = sorted(chain(*rank_groups), key=itemgetter(0, 1))  # desirable answers first
        columns: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row, _, group_values in groups:
            for name, numbers in group_values.items():
                columns[name][row] += numbers
        count = rows or max((row + 1 for row, *_ in groups), default=0)
        return {
            name: pad_ragged([by_row[row] for row in range(count)], np.nan).numpy()
            for name, by_row in columns.items()
        }
