"""Sleep mode over a real engine; what sleeps becomes NaN, so that no use of it goes unseen."""

import pytest
import torch
from shared_vllm import ForgetfulEngine, backend, engine, needs_vllm, nudge, policy_model

from trl.generation.base import Sampling
from trl.types import Prompts

pytestmark = [needs_vllm, pytest.mark.vllm]
PROMPTS = Prompts(messages=["a", "a"], token_ids=[[20, 21]] * 2)
SAMPLING = Sampling(max_tokens=6, seeds=(1, 2))
ROUND = ["wake weights", "load", "wake kv_cache", "generate", "sleep"]


def sleeping(model, **options):
    asleep = engine(ForgetfulEngine, sleeps=True)
    found = backend(model, engine_=asleep, **({"probe_syncs": 0} | options))
    assert asleep.calls == ["sleep"], "an engine that sleeps does so from the beginning"
    asleep.calls.clear()
    return found, asleep


def test_the_order_of_a_round():
    found, asleep = sleeping(policy_model())
    found.sync_weights(0)
    assert asleep.calls == []
    found.generate(PROMPTS, SAMPLING, 2)
    assert asleep.calls == ROUND


def test_weights_that_slept_are_sent_again_though_the_step_is_the_same():
    """Each of several rounds, evaluation batches or tool turns of one optimizer step."""
    model = policy_model()
    found, asleep = sleeping(model)
    awake = backend(model).generate(PROMPTS, SAMPLING, 2)
    for _ in range(3):
        found.sync_weights(7)
        assert found.generate(PROMPTS, SAMPLING, 2) == awake
    assert asleep.calls == 3 * ROUND


def test_several_generations_can_share_one_sync():
    found, asleep = sleeping(policy_model())
    found.sync_weights(0)
    with found.awake():
        for _ in range(2):
            found.generate(PROMPTS, SAMPLING, 2)
    assert asleep.calls == [*ROUND[:4], "generate", "sleep"]


def test_nothing_is_held_between_rounds():
    model = policy_model()
    found, asleep = sleeping(model)
    for step in range(2):
        found.sync_weights(step)
        found.generate(PROMPTS, SAMPLING, 2)
        held = [*asleep.model.parameters(), *asleep._caches()]
        assert all(torch.isnan(tensor).all() for tensor in held)
        nudge(model)


def test_the_probe_runs_on_weights_and_cache_that_are_awake():
    found, asleep = sleeping(policy_model(), probe_syncs=1)
    found.sync_weights(0)
    found.generate(PROMPTS, SAMPLING, 2)
    assert asleep.calls == [*ROUND[:4], *ROUND[3:]]


def test_the_engine_sleeps_after_an_error():
    found, asleep = sleeping(policy_model())
    with pytest.raises(RuntimeError, match="of the loop"), found.awake():
        raise RuntimeError("of the loop")
    assert asleep.calls == [*ROUND[:3], "sleep"]
    found.generate(PROMPTS, SAMPLING, 2)
    assert asleep.calls == [*ROUND[:3], "sleep", *ROUND]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: what sleep frees")
def test_sleep_frees_what_the_engine_held():
    from shared_vllm import fresh_engine

    model = policy_model().cuda()
    before = torch.cuda.mem_get_info()[0]
    found = backend(model, engine_=fresh_engine(model, sleeps=True))
    asleep = torch.cuda.mem_get_info()[0]
    found.sync_weights(0)
    with found.awake():
        awake = torch.cuda.mem_get_info()[0]
    assert awake < asleep - 8 * 2**20
    assert torch.cuda.mem_get_info()[0] >= asleep - 2 * 2**20
    assert before - asleep < before - awake
