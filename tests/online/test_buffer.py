import pytest
import torch

from trl.batch import Batch, Branch, Group
from trl.distributed import Ranks
from trl.online.buffer import Buffer
from trl.types import Prefix


def buffer(passes=2) -> Buffer:
    return Buffer(micro_batches=2, passes=passes, ranks=Ranks())


def rollout_batch(first: int) -> Batch:
    """Four rows of one token, of two prompts; the second row of each has a prompt of its own."""
    groups = []
    for row in (first, first + 2):
        branches = (
            Branch([row], [True], row),
            Branch([row + 1], [True], row + 1, prefix=Prefix([row, row])),
        )
        groups.append(Group(Prefix([row]), branches, row))
    return Batch.of(groups)


def row_ids(batch: Batch) -> list[int]:
    return list(batch.rows.row_ids)


def test_life_of_two_rounds():
    """Two micro-batches, two passes: the order of the table in the sampler's contract."""
    served, made = [], []
    held = buffer()
    for step in range(8):
        if held.is_stale(step):
            made.append(step)
            held.fill(step, rollout_batch(10 * len(made)))
        served.append(row_ids(held.at(step, 1)))
    assert made == [0, 4]
    assert served == [[10, 11], [12, 13]] * 2 + [[20, 21], [22, 23]] * 2


def test_starting_inside_a_round():
    held = buffer()
    assert held.is_stale(5)
    held.fill(5, rollout_batch(0))
    assert row_ids(held.at(5, 1)) == [2, 3]
    assert not held.is_stale(7) and held.is_stale(8)


def test_never_serves_another_round():
    held = buffer(passes=1)
    held.fill(0, rollout_batch(0))
    with pytest.raises(RuntimeError, match="micro-step 2"):
        held.at(2, 1)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_totals_are_the_share_of_an_optimizer_step(accumulation):
    """Of the rollout batch, whose two micro-batches are one step, a half of it, or two of them."""
    held = buffer()
    batch = rollout_batch(0)
    batch.loss_mask[0] = False
    held.fill(0, batch)
    first, second = (held.at(step, accumulation).totals for step in range(2))
    share = accumulation / 2
    assert first.tokens == second.tokens == 3 * share
    assert first.all_rows == 4 * share and first.groups == 2 * share
    assert (first.micro_batch_tokens, second.micro_batch_tokens) == (accumulation, 2 * accumulation)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_round_continues_in_another_process(tmp_path, step):
    """Saved before any micro-step of a round but its first, and read without unpickling code."""
    held, first = buffer(), step // 4 * 4
    batch = rollout_batch(0).with_columns(
        advantages=torch.arange(4.0),
        old_logps=torch.rand(4, 1),
        has_gradient=torch.tensor([True, False, True, True]),
    )
    held.fill(first, batch)
    torch.save(held.state(step), tmp_path / "state.pt")
    again = buffer()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.restore(step, state, torch.device("cpu"))
    for later in range(step, first + 4):
        found, expected = again.at(later, 1), held.at(later, 1)
        assert found.rows.prompt_ids == expected.rows.prompt_ids
        assert found.rows.completion_ids == expected.rows.completion_ids
        assert row_ids(found) == row_ids(expected) and found.mode == expected.mode
        assert torch.equal(found.loss_mask, expected.loss_mask)
        assert torch.equal(found.totals.stack(), expected.totals.stack())
        assert found.columns.keys() == expected.columns.keys()
        for name, column in expected.columns.items():
            assert torch.equal(found.columns[name], column), name
    assert again.is_stale(first + 4)


def test_between_rounds_there_is_nothing_to_save():
    held = buffer()
    assert held.state(0) is None
    held.fill(0, rollout_batch(0))
    assert held.state(4) is None
    held.clear()
    assert held.is_stale(0) and held.state(1) is None


def test_a_loop_that_begins_at_a_round_takes_no_old_one():
    held = buffer()
    held.fill(0, rollout_batch(0))
    state = held.state(2)
    held.restore(0, state, torch.device("cpu"))
    assert held.is_stale(0)
    held.restore(2, None, torch.device("cpu"))
    assert held.is_stale(2)
