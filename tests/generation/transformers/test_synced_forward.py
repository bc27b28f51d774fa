"""Ranks run a decoder equally often, whatever each of them has to do."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from distributed.engines import call
from tiny import tiny_model

from trl.distributed import RankError, Ranks
from trl.generation.base import Sampling
from trl.generation.transformers.backend import TransformersBackend
from trl.generation.transformers.synced_forward import SyncedForward
from trl.types import Prompts

ONE = torch.tensor([[3]])


class Layer(torch.nn.Module):
    """A layer that needs the other ranks, as one whose weights are sharded does."""

    calls = 0

    def forward(self, hidden, **kwargs):
        dist.all_reduce(torch.ones(1))
        Layer.calls += 1
        return hidden


def decoder():
    model = tiny_model().model
    model.layers = torch.nn.ModuleList([Layer(), Layer()])
    return model


def forwards(count):
    """Work that runs the decoder so often."""

    def work(model):
        for _ in range(count):
            model(input_ids=ONE, use_cache=False)

    return work


def failure_between(model):
    forwards(2)(model)
    raise KeyError("between")


def swallowed_failure(model):
    try:
        model(input_ids=None, inputs_embeds="no tensor", use_cache=False)
    except (AttributeError, ValueError, TypeError):
        model(input_ids=ONE, use_cache=False)


def generations(rank, ranks=None):
    """Ranks with more or fewer rows and pieces; the last decodes padded rows."""
    model = tiny_model()
    backend = TransformersBackend(
        lambda: nullcontext(model.eval()),
        pad_id=0,
        device=torch.device("cpu"),
        max_rows=2,
        shared_prefix=rank < 2,
        ranks=ranks or Ranks(),
        layers_in_lockstep=ranks is not None,
    )
    ids = [[5 + row] * (3 + 4 * rank) for row in range(1 + 2 * rank)]
    sampling = Sampling(max_tokens=6, stop_ids=tuple(range(50, 70)), seeds=tuple(range(len(ids))))
    return backend.generate(Prompts(messages=ids, token_ids=ids), sampling, 1)


def work():
    """What happens to one of three processes."""
    ranks = Ranks(Accelerator(cpu=True))
    generated = generations(ranks.rank, ranks)
    assert generated.sampling_logps is None
    lockstep = SyncedForward(ranks, torch.device("cpu"))
    model, found = decoder(), {"generated": generated.completion_ids}
    for name, parts in CASES.items():
        Layer.calls = 0
        try:
            with lockstep.over(model):
                parts[ranks.rank](model)
            found[name] = Layer.calls
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    found["hooks"] = len(model._forward_hooks) + len(model._forward_pre_hooks)
    return found


CASES = {
    "unequal": [forwards(0), forwards(5), forwards(3)],
    "equal": [forwards(2)] * 3,
    "nothing": [forwards(0)] * 3,
    "failure": [forwards(9), failure_between, forwards(0)],
    "after it": [forwards(1), forwards(2), forwards(1)],
}


@pytest.mark.distributed
def test_unequal_work_failures_and_what_comes_after():
    ranks = call(work, processes=3)
    for rank, found in enumerate(ranks):
        alone = generations(rank)
        assert found["generated"] == alone.completion_ids
        assert (alone.sampling_logps is None) == (rank == 2)
        assert (found["unequal"], found["equal"], found["nothing"]) == (10, 4, 0)
        assert (found["after it"], found["hooks"]) == (4, 0)
    words = "Rank 1 failed in generation: KeyError: 'between'"
    assert [found["failure"] for found in ranks] == [
        ("RankError", words),
        ("KeyError", "'between'"),
        ("RankError", words),
    ]


def test_a_forward_that_failed_is_not_followed_by_another():
    lockstep = SyncedForward(Ranks(), torch.device("cpu"))
    model = tiny_model().model
    with pytest.raises(ValueError, match="shared_prefix=False"), lockstep.over(model):
        swallowed_failure(model)
    with lockstep.over(model):
        forwards(1)(model)


def test_one_process_runs_what_it_asks_for():
    model = tiny_model().model
    with SyncedForward(Ranks(), torch.device("cpu")).over(model):
        forwards(3)(model)
    with pytest.raises(RankError), SyncedForward(Ranks(), torch.device("cpu")).over(model):
        raise RankError
