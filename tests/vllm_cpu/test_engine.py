"""What starting and using a real engine does to the process, and what it can be asked for."""

import os
import random
import subprocess
import sys
import weakref

import pytest
import torch
from forks import DEADLINE
from shared_vllm import backend, engine, fresh_engine, needs_vllm, policy_model, shared_llm
from tiny import tiny_tokenizer
from workspace import ROOT, environment

from trl.generation.base import Sampling
from trl.generation.vllm.engine import VLLMEngine, sampling_fields
from trl.generation.vllm.sampling import merge_options
from trl.types import Prompts

pytestmark = [needs_vllm, pytest.mark.vllm]
TOKENIZER = tiny_tokenizer()
PROMPTS = Prompts(messages=["a"] * 4, token_ids=[[20, 21, 22]] * 4)
UNTOUCHED = """
import os, random, sys
sys.path[:0] = ["tests"]
import numpy, torch
import trl, trl.generation.vllm.factory
assert "vllm" not in sys.modules, "imported without being asked for"
torch.set_num_threads(2)
def state():
    return (
        torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype(),
        torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
        torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()),
        {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
    )
from forks import DEADLINE
from shared_vllm import fresh_engine, policy_model
model = policy_model()
before = state()
engine = fresh_engine(model)
for place, (old, new) in enumerate(zip(before, state())):
    assert old == new, f"{place}: {old!r:.300} is {new!r:.300}"
print("unchanged")
"""


def sampling(**changes):
    chosen = Sampling(**({"max_tokens": 12, "seeds": (1, 2, 3, 4), "stop_ids": (1,)} | changes))
    return merge_options(chosen, sampling_fields())


def complete(**changes):
    found = backend(policy_model())
    found.sync_weights(0)
    return found.generate(PROMPTS, sampling(**changes), 4)


@pytest.mark.slow
def test_starting_leaves_the_process_as_it_was(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED],
        cwd=ROOT,
        env=environment(tmp_path) | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.stdout.endswith("unchanged\n"), done.stdout[-500:] + done.stderr[-2000:]


def test_generating_leaves_the_process_as_it_was():
    shared_llm()
    threads, variables = torch.get_num_threads(), dict(os.environ)
    found, model = backend(policy_model(), probe_syncs=1), policy_model()
    stream, other = torch.get_rng_state(), random.getstate()
    first = found.generate(PROMPTS, sampling(), 4)
    assert torch.equal(torch.get_rng_state(), stream)
    assert random.getstate() == other and threads == torch.get_num_threads()
    assert dict(os.environ) == variables
    assert first == backend(model).generate(PROMPTS, sampling(), 4)


def test_greedy_by_generation_kwargs():
    found = complete(extra={"do_sample": False, "max_new_tokens": 3}, stop_ids=())
    assert found.completion_ids == [found.completion_ids[0]] * 4
    ids = list(PROMPTS.token_ids[0])
    for token in found.completion_ids[0]:
        assert token == policy_model()(torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(token)
    assert len(ids) == 6


def test_stop_strings_end_a_completion():
    free = complete(stop_ids=()).completion_ids
    text = TOKENIZER.decode(free[0][4:6])
    found = complete(stop_ids=(), extra={"stop": [text]})
    assert found.completion_ids[0] == free[0][:6] and found.finish_reasons[0] == "stop"


def test_more_stop_ids_and_options_that_only_vllm_knows():
    free = complete(stop_ids=()).completion_ids
    found = complete(extra={"stop_token_ids": [free[1][2]], "min_tokens": 1})
    assert found.completion_ids[1] == free[1][:3] and found.finish_reasons[1] == "stop"
    biased = complete(extra={"logit_bias": {33: 100.0}, "max_tokens": 5}, stop_ids=())
    assert biased.completion_ids == [[33] * 5] * 4


def test_completions_match_a_regular_expression():
    found = complete(extra={"structured_outputs": {"regex": "[0-9]{2}-[a-c]"}})
    for ids, reason in zip(found.completion_ids, found.finish_reasons, strict=True):
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        assert len(text) == 4 and text[:2].isdigit() and text[2] == "-" and text[3] in "abc"
        assert reason == "stop" and ids[-1] == 1


def test_a_prompt_that_leaves_no_room_is_named():
    prompts = Prompts(messages=["a", "b"], token_ids=[[20], [20] * 128])
    with pytest.raises(ValueError, match=r"row 1 .* 128 tokens, but .* context is 128"):
        backend(policy_model()).generate(prompts, sampling(seeds=(1, 2)), 1)


def test_a_completion_ends_where_the_context_does():
    prompts = Prompts(messages=["a"], token_ids=[[20] * 120])
    found = backend(policy_model()).generate(
        prompts, sampling(seeds=(1,), max_tokens=50, stop_ids=()), 1
    )
    assert (len(found.completion_ids[0]), found.finish_reasons) == (8, ["length"])


def test_evaluation_uses_the_same_engine_with_its_own_settings():
    found = backend(policy_model())
    train = found.generate(PROMPTS, sampling(), 4)
    one = Prompts(messages=["a"], token_ids=PROMPTS.token_ids[:1])
    found.generate(one, sampling(extra={"do_sample": False}, seeds=(9,), max_tokens=3), 1)
    assert found.generate(PROMPTS, sampling(), 4) == train


def test_one_request_for_each_prompt(monkeypatch):
    seen, llm = [], shared_llm()
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda *a, **k: seen.append(a) or generate(*a, **k))
    prompts = Prompts(messages=list("aaabbb"), token_ids=[[20]] * 3 + [[21]] * 3)
    found = backend(policy_model(), probe_syncs=0)
    found.generate(prompts, sampling(seeds=tuple(range(6))), 3)
    ((requests, wanted),) = seen
    assert [request["prompt_token_ids"] for request in requests] == [[20], [21]]
    assert [(params.n, params.seed) for params in wanted] == [(3, 0), (3, 3)]


def test_the_prompt_of_a_group_is_computed_once():
    """All but the last block of a prompt come from the cache for all but one completion."""
    prompts = Prompts(messages=["a"] * 4, token_ids=[list(range(10, 90))] * 4)
    llm, cached = shared_llm(), []
    generate = llm.generate
    found = backend(policy_model(), probe_syncs=0)
    try:
        llm.generate = lambda *a, **k: cached.append(generate(*a, **k)) or cached[-1]
        found.generate(prompts, sampling(), 4)
    finally:
        del llm.generate
    assert cached[0][0].num_cached_tokens == 64  # two blocks of 32


def test_running_out_of_memory_says_what_to_lower(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(shared_llm(), "generate", fail)
    with pytest.raises(RuntimeError, match="Lower vllm_gpu_memory_utilization"):
        complete()


def test_an_interrupted_call_leaves_no_requests(monkeypatch):
    llm = shared_llm()
    step, count = llm.llm_engine.step, []

    def interrupted():
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    found = backend(policy_model(), probe_syncs=0)
    with pytest.raises(KeyboardInterrupt):
        found.generate(PROMPTS, sampling(), 4)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert found.generate(PROMPTS, sampling(), 4) == complete()


def test_an_engine_that_is_collected_takes_nothing_along():
    """vLLM itself would end the process group of training, and those of other engines."""
    import gc

    complete()
    core = weakref.ref(fresh_engine(policy_model())._llm.llm_engine.engine_core)
    gc.collect()
    assert core() is None
    assert torch.distributed.is_initialized()
    assert complete() == complete()


def test_the_wrapper_knows_what_the_engine_sees():
    assert isinstance(engine(), VLLMEngine) and engine().context_length == 128
    assert engine().dtype == torch.float32
