from dataclasses import replace

import pytest
import torch

from trl.online.guard import FiniteGuard, NonFiniteError
from trl.types import Rows


def guard(rank=0, gather=lambda value: [value]) -> FiniteGuard:
    return FiniteGuard(rank, gather)


def test_bad_rows_only_where_the_mask_holds():
    values = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0], [1.0, 2.0]])
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    watcher, rows = guard(), Rows.of([([1], [2, 3])] * 3)
    for given, bad in ((None, "0, 1"), (mask, "1")):
        watcher.watch("x", values, rows, given)
        assert watcher.findings() == f"x of row {bad} on rank 0 is NaN or infinite."
    watcher.watch("x", torch.tensor([1.0, torch.nan, 1.0]), rows)
    assert "x of row 1 on" in watcher.findings()


def rows_numbered(numbers):
    """Rows of two tokens each that messages call by these numbers."""
    rows = Rows.of([([5], [6, 7])] * len(numbers))
    return replace(rows, row_ids=numbers)


def test_message_names_step_rank_row_and_value():
    watcher, batch = guard(rank=3), rows_numbered([7, 8])
    watcher.watch("log-probability", torch.tensor([[0.0, 0.0], [torch.nan, 0.0]]), batch)
    with pytest.raises(NonFiniteError, match="Step 5: log-probability of row 8 on rank 3 is NaN"):
        watcher.check(5)


def test_only_entries_of_the_mask_count():
    watcher, rows = guard(), Rows.of([([1], [2, 3]), ([1], [4])])
    values = torch.tensor([[0.0, 0.0], [0.0, torch.nan]])
    watcher.watch("value", values, rows, torch.tensor([[True, True], [True, False]]))
    assert watcher.findings() == ""
    watcher.watch("value", values, rows)
    assert "value of row 1 on rank 0" in watcher.findings()


def test_every_rank_raises_what_one_found():
    watcher = guard(gather=lambda value: [value, "loss of row 2 on rank 1 is NaN or infinite."])
    with pytest.raises(NonFiniteError, match="row 2 on rank 1"):
        watcher.check(1)


def test_finite_values_pass_and_are_forgotten():
    watcher, batch = guard(), rows_numbered([0, 1])
    watcher.watch("x", torch.zeros(2, 2), batch)
    watcher.check(1)
    watcher.watch("x", torch.full((2, 2), torch.nan), batch)
    watcher.forget()
    watcher.check(2)
    assert watcher.findings() == ""
