"""What all vLLM backends share, over an engine that answers from a table."""

import dataclasses

import pytest
import torch

from trl.generation.vllm.backend import BOUNDS, Policy, VLLMBackend, rows_of_rank
from trl.generation.vllm.weight_proof import WeightSyncError
from trl.types import Generations, Prompts, Sampling

POLICY = Policy(
    weights=lambda: iter(()),
    stamp=lambda: 0,
    logps=lambda prompt, ids: [-1.0] * len(ids),
    temperature=0.7,
)
PROMPTS = Prompts(messages=["a"] * 2, token_ids=[[5, 6, 7]] * 2)


class Table(VLLMBackend):
    """Notes what it is asked for; log-probabilities are off by `gap`."""

    def __init__(self, gap=0.0, problem=None, context=8, policy=POLICY, **options):
        super().__init__(policy, context, torch.float32, **options)
        self.calls, self.gap, self.problem = [], gap, problem

    def _wake(self, part):
        self.calls.append(part)

    def _send(self):
        self.calls.append("send")
        return self.problem

    def _complete(self, token_ids, seeds, sampling):
        self.calls.append(("complete", seeds))
        return self._rows([[9]] * len(token_ids))

    def _complete_probe(self, prompt, sampling):
        self.calls.append((prompt, sampling.max_tokens, sampling.temperature))
        return prompt, self._rows([[9, 9], [9, 8]])

    def _rows(self, ids):
        logps = [[-1.0] * len(row) for row in ids[:-1]] + [[self.gap - 1.0] * len(ids[-1])]
        return Generations(completion_ids=ids, finish=["length"] * len(ids), sampling_logps=logps)


def test_the_order_of_a_round():
    found = Table()
    found.generate(PROMPTS, Sampling(max_tokens=1, seeds=(3, 4)), 2)
    assert found.calls == ["weights", "send", "kv_cache", ("complete", (3, 4))]


def test_weights_are_sent_when_step_or_stamp_differ():
    stamps, steps, sent = [0, 0, 1, 1, 1], [0, 0, 0, 1, 1], []
    found = Table(policy=dataclasses.replace(POLICY, stamp=lambda: stamps[0]))
    for step in steps:
        found.sync_weights(step)
        with found.awake():
            sent.append("send" in found.calls)
        found.calls.clear()
        del stamps[0]
        stamps.append(1)
    assert sent == [True, False, True, True, False]


def test_a_problem_stops_and_is_not_forgotten():
    found = Table(problem="x was not what was sent")
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="Step 0, rank 0: .* x was not what was sent"):
            found.generate(PROMPTS, Sampling(max_tokens=1), 2)
    assert found.calls == ["weights", "send"] * 2


def test_the_probe_is_what_fits_and_comes_at_some_syncs():
    reported = []
    found = Table(context=20, probe_syncs=2, report=lambda name, value: reported.append(name))
    long = Prompts(messages=["a"], token_ids=[list(range(19))])
    for step in range(4):
        found.sync_weights(step)
        found.generate(long, Sampling(max_tokens=1), 1)
    probes = [call for call in found.calls if isinstance(call, tuple) and len(call) == 3]
    assert probes == [(list(range(19)), 1, 0.7)] * 2
    assert reported.count("vllm/logp_gap") == 2 and reported.count("vllm/sync_seconds") == 4


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_the_engine_that_is_farthest_off_counts(share):
    found = Table(gap=share * BOUNDS[torch.float32], probe_syncs=1)
    if share < 1:
        found.generate(PROMPTS, Sampling(max_tokens=1), 2)
        return
    with pytest.raises(WeightSyncError, match="differ by 0.0011 nats a token, more than 0.001"):
        found.generate(PROMPTS, Sampling(max_tokens=1), 2)


def test_each_rank_takes_its_rows():
    rows = Generations(
        completion_ids=[[n] for n in range(6)],
        finish=["stop"] * 6,
        sampling_logps=[[-float(n)] for n in range(6)],
    )
    shares = [[[1]] * 2, [[1]], [[1]] * 3]
    found = [rows_of_rank(rows, shares, rank) for rank in range(3)]
    assert [row.completion_ids for row in found] == [[[0], [1]], [[2]], [[3], [4], [5]]]
    assert found[1].sampling_logps == [[-2.0]]
