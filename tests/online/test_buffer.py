import dataclasses

import pytest
import torch

from trl.online.buffer import Buffer
from trl.types import Rollout, prefixes_of


def rollout(first: int) -> Rollout:
    rows = list(range(first, first + 4))
    return Rollout(
        prefixes=prefixes_of([[row] for row in rows]),
        completion_ids=[[row] for row in rows],
        row_ids=rows,
        loss_mask=torch.ones(4, 1, dtype=torch.bool),
        num_loss_tokens=torch.tensor(4),
        num_loss_rows=torch.tensor(4),
    )


def test_life_of_two_rounds():
    """Two micro_batches, two passes: the order of the table in the sampler's contract."""
    buffer, served, made = Buffer(micro_batches=2, passes=2), [], []
    for step in range(8):
        if buffer.is_stale(step):
            made.append(step)
            buffer.fill(step, rollout(10 * len(made)))
        served.append(buffer.at(step).row_ids)
    assert made == [0, 4]
    assert served == [[10, 11], [12, 13]] * 2 + [[20, 21], [22, 23]] * 2


def test_starting_inside_a_round():
    buffer = Buffer(micro_batches=2, passes=2)
    assert buffer.is_stale(5)
    buffer.fill(5, rollout(0))
    assert buffer.at(5).row_ids == [2, 3]
    assert not buffer.is_stale(7) and buffer.is_stale(8)


def test_never_serves_another_round():
    buffer = Buffer(micro_batches=2, passes=1)
    buffer.fill(0, rollout(0))
    with pytest.raises(RuntimeError, match="micro-step 2"):
        buffer.at(2)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_round_continues_in_another_process(tmp_path, step):
    """Saved before any micro-step of a round but its first, and read without unpickling code."""
    buffer = Buffer(micro_batches=2, passes=2)
    first = step // 4 * 4
    filled = rollout(0).replace(
        advantages=torch.arange(4.0), old_logps=torch.rand(4, 1), has_gradient=[True] * 4
    )
    buffer.fill(first, filled)
    torch.save(buffer.state(step), tmp_path / "state.pt")
    again = Buffer(micro_batches=2, passes=2)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.restore(step, state, torch.device("cpu"))
    for later in range(step, first + 4):
        found, expected = again.at(later), buffer.at(later)
        for name in (field.name for field in dataclasses.fields(Rollout)):
            ours, theirs = getattr(found, name), getattr(expected, name)
            same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
            assert same, name
    assert again.is_stale(first + 4)


def test_between_rounds_there_is_nothing_to_save():
    buffer = Buffer(micro_batches=2, passes=2)
    assert buffer.state(0) is None
    buffer.fill(0, rollout(0))
    assert buffer.state(4) is None
    buffer.clear()
    assert buffer.is_stale(0) and buffer.state(1) is None


def test_a_loop_that_begins_at_a_round_takes_no_old_one():
    buffer = Buffer(micro_batches=2, passes=2)
    buffer.fill(0, rollout(0))
    state = buffer.state(2)
    buffer.restore(0, state, torch.device("cpu"))
    assert buffer.is_stale(0)
    buffer.restore(2, None, torch.device("cpu"))
    assert buffer.is_stale(2)
