import itertools

import pytest
from accelerate.data_loader import BatchSamplerShard
from datasets import IterableDataset
from torch.utils.data import BatchSampler

from trl.online.sampler import RepeatIterableDataset, RepeatSampler


def test_layout_of_two_rounds():
    """4 prompts a round, groups of 2, 4 micro-steps a round; prompts 8 and 9 are dropped."""
    sampler = RepeatSampler(range(10), 2, batch_size=4, repeat_count=4, shuffle=False)
    first = [0, 0, 1, 1, 2, 2, 3, 3]
    second = [4, 4, 5, 5, 6, 6, 7, 7]
    assert list(sampler) == first * 4 + second * 4
    assert len(sampler) == 64


def test_ranks_get_whole_local_batches():
    """B=2, S=2, two ranks: local batches of 4 rows, dealt in order."""
    sampler = RepeatSampler(range(10), 2, batch_size=4, repeat_count=4, shuffle=False)
    dealt = [
        list(BatchSamplerShard(BatchSampler(sampler, 4, drop_last=False), 2, rank))
        for rank in range(2)
    ]
    assert dealt[0] == [[0, 0, 1, 1]] * 4 + [[4, 4, 5, 5]] * 4
    assert dealt[1] == [[2, 2, 3, 3]] * 4 + [[6, 6, 7, 7]] * 4


@pytest.mark.parametrize(
    ("inner", "batch", "outer", "size"), itertools.product((1, 3), (1, 4), (1, 2), (4, 9))
)
def test_length_and_groups(inner, batch, outer, size):
    sampler = RepeatSampler(range(size), inner, batch, outer, seed=0)
    found = list(sampler)
    assert len(found) == len(sampler) == size // batch * batch * inner * outer
    groups = [found[i : i + inner] for i in range(0, len(found), inner)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len(set(found)) == size // batch * batch


def test_order_follows_from_seed_and_epoch():
    one, two = (RepeatSampler(range(50), 1, seed=7) for _ in range(2))
    assert list(one) == list(two) == list(one)
    one.set_epoch(3)
    assert list(one) != list(two)
    two.set_epoch(3)
    assert list(one) == list(two)
    assert list(RepeatSampler(range(50), 1, seed=8)) != list(RepeatSampler(range(50), 1, seed=7))


def test_stream_has_the_order_of_the_sampler():
    rows = [{"prompt": str(i)} for i in range(10)]
    stream = RepeatIterableDataset(rows, 2, batch_size=4, repeat_count=3)
    sampler = RepeatSampler(rows, 2, batch_size=4, repeat_count=3, shuffle=False)
    assert [row["prompt"] for row in stream] == [str(i) for i in sampler]


def test_a_stream_shorter_than_a_round_says_so():
    stream = RepeatIterableDataset([{"prompt": "a"}] * 3, 2, batch_size=4)
    with pytest.raises(ValueError, match="fewer rows than the 4 prompts that one round takes"):
        list(stream)


def test_stream_passes_the_epoch_on():
    source = IterableDataset.from_generator(lambda: ({"x": i} for i in range(20)))
    stream = RepeatIterableDataset(source.shuffle(seed=1, buffer_size=20), 1)
    first = [row["x"] for row in stream]
    stream.set_epoch(1)
    assert sorted(first) == list(range(20)) and [row["x"] for row in stream] != first
