"""What all vLLM backends share, over an engine that answers from a table."""

import pytest
import torch
from shared_vllm import model_policy
from torch import nn

from trl.generation.base import Generations, Sampling
from trl.generation.vllm.backend import LOGP_TOLERANCES, VLLMBackend, VLLMColocateBackend
from trl.generation.vllm.sampling import CompletionRequest
from trl.generation.vllm.weight_verifier import WeightSyncError
from trl.types import Prompts, prefixes_of

POLICY = model_policy(nn.Linear(1, 1), logps=lambda prompt, ids: [-1.0] * len(ids))
PROMPTS = Prompts(messages=["a"] * 2, token_ids=[[5, 6, 7]] * 2)


class Table(VLLMBackend):
    """Notes what it is asked for; log-probabilities of the last engine are off by `gap`."""

    def __init__(self, gap=0.0, problem=None, context=8, others=(), **options):
        options |= {"num_engines": 2, "temperature": 0.7, "weights": lambda model: iter(())}
        super().__init__(POLICY, context, **options)
        self.calls, self.gap, self.problem, self.others = [], gap, problem, others

    def _wake(self, part):
        self.calls.append(part)

    def _send_weights(self, weights):
        self.calls.append("send")
        return self.problem

    def _gather_to_engine(self, value):
        return [*self.others, value, *self.others], len(self.others)

    def _run_requests(self, requests, sampling):
        self.calls.append((requests, sampling))
        ids = [
            [request.token_ids[0], row]
            for request in requests
            for row in range(request.num_completions)
        ]
        logps = [[-1.0] * 2 for _ in ids[:-1]] + [[self.gap - 1.0] * 2]
        return Generations(
            completion_ids=ids, finish_reasons=["length"] * len(ids), sampling_logps=logps
        )


def test_the_order_of_a_round():
    found, sampling = Table(), Sampling(max_tokens=1, seeds=(3, 4))
    found.generate(PROMPTS, sampling, 2)
    asked = [CompletionRequest([5, 6, 7], 2, 3)]
    assert found.calls == ["weights", "send", "kv_cache", (asked, sampling)]


def test_seeds_are_drawn_from_the_global_stream_where_none_are_given():
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found = Table()
        found.generate(PROMPTS, Sampling(max_tokens=1), 2)
        drawn.append(found.calls[-1][0][0].seed)
    assert drawn[0] == drawn[1] != drawn[2]


def test_weights_are_sent_when_step_or_weights_moved():
    sent, found = [], Table()
    for step, moves in [(0, False), (0, False), (0, True), (1, False), (1, False)]:
        if moves:
            with torch.no_grad():
                POLICY.model.weight.add_(1.0)
        found.sync_weights(step)
        with found.awake():
            sent.append("send" in found.calls)
        found.calls.clear()
    assert sent == [True, False, True, True, False]


def test_a_prompt_that_leaves_no_room_is_named():
    long = Prompts(messages=["a", "b"], token_ids=[[1] * 7, [1] * 8])
    with pytest.raises(ValueError, match=r"row 1 \('b'\) has 8 tokens, .* context is 8"):
        Table().generate(long, Sampling(max_tokens=1), 1)


def test_a_problem_stops_and_is_not_forgotten():
    found = Table(problem="x differs from what was sent")
    for _ in range(2):
        with pytest.raises(
            WeightSyncError, match="Step 0, rank 0: .* x differs from what was sent"
        ):
            found.generate(PROMPTS, Sampling(max_tokens=1), 2)
    assert found.calls == ["weights", "send"] * 2


def test_the_probe_is_what_fits_and_comes_at_some_syncs():
    found = Table(context=20, probe_syncs=2)
    long = Prompts(messages=["a"], token_ids=[list(range(19))])
    for step in range(4):
        found.sync_weights(step)
        found.generate(long, Sampling(max_tokens=1, temperature=0.5), 1)
    probes = [asked for asked in found.calls if isinstance(asked, tuple) and len(asked[0]) == 2]
    one = CompletionRequest(list(range(19)), 1, 0)
    assert [(requests, few.max_tokens, few.temperature) for requests, few in probes] == [
        ([one, one], 1, 0.7)
    ] * 2
    measured = [name for name, _ in found.take_metrics()]
    assert measured.count("vllm/logp_gap") == 2 and measured.count("vllm/sync_seconds") == 4
    assert measured.count("vllm/generate_seconds") == 4 and not found.take_metrics()


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_the_engine_that_is_farthest_off_counts(share):
    found = Table(gap=share * LOGP_TOLERANCES[torch.float32], probe_syncs=1)
    if share < 1:
        found.generate(PROMPTS, Sampling(max_tokens=1), 2)
        return
    with pytest.raises(WeightSyncError, match="differ by 0.0011 nats a token, more than 0.001"):
        found.generate(PROMPTS, Sampling(max_tokens=1), 2)


def test_each_rank_takes_its_rows():
    shares = [(prefixes_of([[8]] * 3), (1, 2, 3)), (prefixes_of([[9]]), (4,))]
    found = Table(others=shares)
    rows = found.generate(PROMPTS, Sampling(max_tokens=1, seeds=(5, 6)), 2)
    assert rows.completion_ids == [[5, 0], [5, 1]] and len(rows.sampling_logps) == 2
    asked = [(request.token_ids[0], request.num_completions) for request in found.calls[-1][0]]
    assert asked == [(8, 3), (9, 1), (5, 2), (8, 3), (9, 1)]


def test_log_probabilities_of_the_engine_do_not_replace_the_policys():
    assert not VLLMColocateBackend.reports_policy_logps


def test_bounds_widen_with_the_rounding_of_the_precision():
    assert (
        LOGP_TOLERANCES[torch.float32]
        < LOGP_TOLERANCES[torch.float16]
        < LOGP_TOLERANCES[torch.bfloat16]
    )
