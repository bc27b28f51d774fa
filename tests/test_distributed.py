"""The collectives of a training step."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from distributed.engines import call
from transformers.integrations import deepspeed

from trl.distributed import RankError, Ranks, without_zero3_init


class Place:
    """What `Ranks` reads of an accelerator before any collective."""

    def __init__(self, rank, count):
        self.process_index, self.num_processes = rank, count


def test_one_process_gets_back_what_it_gave():
    ranks = Ranks(Accelerator(cpu=True))
    rows, value = torch.arange(6.0).view(3, 2), torch.tensor(4)
    assert (ranks.rank, ranks.count) == (0, 1)
    assert ranks.gather(rows) is rows
    assert ranks.sum(value) is value
    assert ranks.gather_objects({"a": [1]}) == [{"a": [1]}]
    assert torch.equal(ranks.local(rows), rows)


def gather_and_fail():
    """What is raised while a collective fails says nothing of the rank that is gone."""
    try:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    finally:
        raise KeyError("what was to be gathered")


def test_an_error_while_a_collective_fails_is_that_of_another_rank():
    words = "Rank 0 lost contact with a rank: it ended without a word"
    with pytest.raises(RankError, match=words), Ranks(Place(0, 2)).propagate_failures():
        gather_and_fail()


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyError("x"), ["KeyError: 'x'"]), (SystemExit(3), ["SystemExit: 3"]), (RankError("x"), [])],
)
def test_others_are_told_of_what_they_do_not_know(error, told):
    class Noting(Ranks):
        def gather_objects(self, value):
            found.append(value)
            return [value]

    found = []
    with pytest.raises(type(error)), Noting().fail_together("this"):
        raise error
    assert found == told


def test_one_process_fails_as_it_would_alone():
    ranks = Ranks()
    assert (ranks.rank, ranks.count, ranks.shards_weights) == (0, 1, False)
    assert ranks.all(True) and not ranks.all(False)
    with pytest.raises(KeyError) as found, ranks.propagate_failures(), ranks.fail_together("this"):
        raise KeyError("mine")
    assert not hasattr(found.value, "__notes__")


@pytest.mark.parametrize(
    ("kind", "stage", "shared"),
    [
        (DistributedType.NO, None, False),
        (DistributedType.MULTI_CPU, None, False),
        (DistributedType.MULTI_GPU, None, False),
        (DistributedType.DEEPSPEED, 2, False),
        (DistributedType.DEEPSPEED, 3, True),
        (DistributedType.FSDP, None, True),
    ],
)
def test_engines_that_share_weights(kind, stage, shared):
    place = Place(0, 2)
    place.distributed_type = kind
    place.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    assert Ranks(place).shards_weights is shared


def test_rows_are_divided_by_groups_of_equal_size():
    with pytest.raises(ValueError, match=r"cp_size \(or sp_size\), 2, .* processes, 3\."):
        Ranks(Place(0, 3), per_row=2).row_group()


@pytest.mark.parametrize(("rank", "rows"), [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])])
def test_local_is_the_share_of_the_rank(rank, rows):
    gathered = torch.arange(6)[:, None] * torch.ones(1, 3, dtype=torch.long)
    found = Ranks(Place(rank, 3)).local(gathered)
    assert found.tolist() == [[row] * 3 for row in rows]


def failure(ranks, rank):
    """What a rank hears when one has failed: the error, and what is added to it."""
    try:
        with ranks.propagate_failures(), ranks.propagate_failures(), ranks.fail_together("a try"):
            if ranks.rank == rank:
                raise KeyError("mine")
    except (KeyError, RankError) as error:
        return repr(error), list(getattr(error, "__notes__", []))
    return None


def work():
    """What the collectives of one of two processes return."""
    ranks = Ranks(Accelerator(cpu=True))
    rank = ranks.rank
    mine = torch.tensor([[1.5, 2.0], [3.0, float("nan")]]) + 10 * rank
    gathered = ranks.gather(mine)
    return {
        "place": (ranks.rank, ranks.count),
        "rows": gathered.nan_to_num(-1.0).tolist(),
        # A transposed tensor is not contiguous.
        "transposed": ranks.gather(mine.t()).nan_to_num(-1.0).tolist(),
        "flags": ranks.gather(torch.tensor([True, rank == 1])).tolist(),
        "counts": ranks.sum(torch.tensor([rank + 1, 5])).tolist(),
        "scalar": ranks.sum(torch.tensor(0.25 + rank)).item(),
        "objects": ranks.gather_objects({"rank": rank, "texts": ["a"] * (rank + 1)}),
        "empty": ranks.gather_objects([]),
        "local": ranks.local(gathered).nan_to_num(-1.0).tolist(),
        "all": [ranks.all(True), ranks.all(rank == 1)],
        "failures": [failure(ranks, 0), failure(ranks, None), failure(ranks, 1)],
    }


@pytest.mark.distributed
def test_two_processes():
    both = call(work)
    rows = [[[1.5, 2.0], [3.0, -1.0]], [[11.5, 12.0], [13.0, -1.0]]]
    for rank, found in enumerate(both):
        assert found.pop("place") == (rank, 2)
        assert found.pop("local") == rows[rank]
        own = ("KeyError('mine')", [f"This was rank {rank} of 2."])
        heard = (f"""RankError("Rank {1 - rank} failed in a try: KeyError: 'mine'")""", [])
        assert found.pop("failures") == ([own, None, heard] if rank == 0 else [heard, None, own])
    assert both[0] == both[1]
    assert both[0] == {
        "rows": rows[0] + rows[1],
        "transposed": [[1.5, 3.0], [2.0, -1.0], [11.5, 13.0], [12.0, -1.0]],
        "flags": [True, False, True, True],
        "counts": [3, 10],
        "scalar": 1.5,
        "objects": [{"rank": 0, "texts": ["a"]}, {"rank": 1, "texts": ["a", "a"]}],
        "empty": [[], []],
        "all": [True, False],
    }


def test_models_are_whole_inside_and_divided_again_afterwards():
    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert deepspeed.is_deepspeed_zero3_enabled()
    with without_zero3_init():
        assert not deepspeed.is_deepspeed_zero3_enabled()
    assert deepspeed.is_deepspeed_zero3_enabled() and deepspeed.deepspeed_config() is config.config
    del config
    with without_zero3_init():
        assert not deepspeed.is_deepspeed_zero3_enabled()
    assert not deepspeed.is_deepspeed_zero3_enabled()
