import pytest
import torch

from trl.online.buffer import Buffer
from trl.types import Rollout


def rollout(first: int) -> Rollout:
    rows = list(range(first, first + 4))
    return Rollout(
        prompt_ids=[[row] for row in rows],
        completion_ids=[[row] for row in rows],
        row_ids=rows,
        loss_mask=torch.ones(4, 1, dtype=torch.bool),
        num_loss_tokens=torch.tensor(4),
        num_loss_rows=torch.tensor(4),
    )


def test_life_of_two_rounds():
    """Two slices, two passes: the order of the table in the sampler's contract."""
    buffer, served, made = Buffer(slices=2, passes=2), [], []
    for step in range(8):
        if buffer.is_stale(step):
            made.append(step)
            buffer.fill(step, rollout(10 * len(made)))
        served.append(buffer.at(step).row_ids)
    assert made == [0, 4]
    assert served == [[10, 11], [12, 13]] * 2 + [[20, 21], [22, 23]] * 2


def test_starting_inside_a_round():
    buffer = Buffer(slices=2, passes=2)
    assert buffer.is_stale(5)
    buffer.fill(5, rollout(0))
    assert buffer.at(5).row_ids == [2, 3]
    assert not buffer.is_stale(7) and buffer.is_stale(8)


def test_never_serves_another_round():
    buffer = Buffer(slices=2, passes=1)
    buffer.fill(0, rollout(0))
    with pytest.raises(RuntimeError, match="micro-step 2"):
        buffer.at(2)
