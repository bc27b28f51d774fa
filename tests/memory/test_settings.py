"""The tokens of a forward against those that the scorer lays out."""

import pytest
import torch

from trl.memory.settings import (
    SHORTEST_PASS,
    SHORTEST_TAIL_PASS,
    Forward,
    Parts,
    RunSettings,
    largest,
)
from trl.memory.sharding import Sharding
from trl.models import packed_passes as passes
from trl.models.packed_attention import KEYWORD
from trl.models.packed_layout import packed_layout, plain_layout
from trl.types import Rollout

CPU = torch.device("cpu")


def rollout(prompts, group_size, prompt, completion):
    """Rows whose completions differ from their first token on."""
    rows = prompts * group_size
    mask = torch.ones(rows, completion, dtype=torch.bool)
    return Rollout(
        prompt_ids=[[row // group_size] * prompt for row in range(rows)],
        completion_ids=[[100 + row] * completion for row in range(rows)],
        row_ids=list(range(rows)),
        loss_mask=mask,
        num_loss_tokens=mask.sum(),
        num_loss_rows=torch.tensor(rows),
    )


def settings(group_size, prompt, completion, micro_batch, **more):
    return RunSettings(group_size, prompt, completion, micro_batch, **more)


@pytest.mark.parametrize(("prompts", "group_size"), [(1, 4), (3, 2)])
def test_tokens_are_those_of_the_layouts(prompts, group_size):
    batch = rollout(prompts, group_size, 7, 5)
    run = settings(group_size, 7, 5, len(batch))
    packed = packed_layout(batch, CPU).inputs["input_ids"]
    assert run.forward(len(batch), cuts=False).tokens == packed.numel()
    plain = plain_layout(batch, 0, CPU).inputs["input_ids"]
    unshared = run.replace(shared_prefix=False).forward(len(batch), cuts=True)
    assert unshared == Forward(((plain.numel(), 0),))


@pytest.mark.parametrize(
    ("prompts", "group_size", "prompt", "completion"),
    [(1, 8, 100, 300), (1, 4, 4000, 500), (2, 4, 1000, 600), (1, 2, 10, 2500), (1, 4, 100, 100)],
)
def test_passes_are_those_of_the_scorer(prompts, group_size, prompt, completion):
    batch = rollout(prompts, group_size, prompt, completion)
    run = settings(group_size, prompt, completion, len(batch))
    packing = packed_layout(batch, CPU).inputs[KEYWORD]
    found = run.forward(len(batch), cuts=True)
    if found.tokens <= passes.SHORTEST_PASS:
        assert not found.is_cut
        assert found.kept == 0
        return
    together = prompts * prompt
    cut = passes._tail_passes(packing, {}, CPU)
    sizes = [at.stop - at.start for at, _ in cut]
    assert found.passes == ((together, 0), *((size, size) for size in sizes))
    assert found.kept == together


def test_bounds_are_those_of_the_scorer():
    assert (SHORTEST_PASS, SHORTEST_TAIL_PASS) == (
        passes.SHORTEST_PASS,
        passes.SHORTEST_TAIL_PASS,
    )


@pytest.mark.parametrize("group_size", range(2, 9))
@pytest.mark.parametrize("rows", range(1, 17))
def test_most_prompts_in_a_micro_batch(group_size, rows):
    """Micro-batches cut a long row of groups anywhere a multiple of their size allows."""
    found = settings(group_size, 1, 1, rows).groups(rows)
    starts = range(0, rows * group_size, rows)
    seen = [len({row // group_size for row in range(at, at + rows)}) for at in starts]
    assert found >= max(seen)
    assert found <= max(seen) + 1


def test_rows_and_autocast():
    run = settings(4, 1, 1, 8, slices=3, product_bytes=2)
    assert run.rows == 24
    assert run.autocast
    assert not run.replace(weight_bytes=2).autocast


def test_parts_add_up():
    parts = Parts(weights=1, kv_cache=2).plus(kv_cache=3, head=0.5)
    assert parts == Parts(weights=1, kv_cache=5, head=0.5)
    assert parts.total == 6.5
    assert largest([Parts(head=1), parts, Parts(weights=6)]) is parts


def test_a_forward_over_sharded_weights_is_one_pass():
    run = RunSettings(8, 2000, 600, 8)
    assert run.forward(8, cuts=True).is_cut
    whole = run.replace(sharding=Sharding("zero", 2, 2)).forward(8, cuts=True)
    shards = run.replace(sharding=Sharding("fsdp2", 3, 2)).forward(8, cuts=True)
    assert whole.is_cut and not shards.is_cut
