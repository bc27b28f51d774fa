"""What needs no engine; tests/vllm_cpu has real servers, and two ranks."""

import pytest
import torch
from shared_vllm import model_policy
from stub_server import routes, stub_server
from torch import nn

from trl.generation.vllm.sampling import Request
from trl.generation.vllm.server.backend import VLLMServerBackend
from trl.generation.vllm.server.client import ServerError
from trl.generation.vllm.server.server_pool import Server, ServerPool
from trl.types import Prompts, Sampling

POLICY = model_policy(nn.Linear(1, 1))
PROMPTS = Prompts(messages=["x"], token_ids=[[9]])
ONE = Sampling(max_tokens=1, seeds=(3,))


@pytest.fixture
def backend():
    """Over a server that answers requests, but has not met this process."""
    with stub_server(routes() | {"/v1/completions": [(400, "too long")]}) as stub:
        pool = ServerPool([Server(stub.url, 5.0)])
        yield lambda weights=None: VLLMServerBackend(pool, POLICY, pool.context, weights=weights)


def test_an_error_of_the_policy_is_not_taken_for_one_of_the_server(backend):
    def weights(model):
        yield "a", torch.zeros(1)
        raise KeyError("of the policy")

    with pytest.raises(KeyError, match="of the policy"):
        backend(weights).generate(PROMPTS, ONE, 1)


def test_all_weights_are_walked_through_though_none_can_be_sent(backend):
    walked = []

    def weights(model):
        for name in "abc":
            walked.append(name)
            yield name, torch.zeros(1)

    with pytest.raises(ServerError, match="the servers were left after a failure"):
        backend(weights).generate(PROMPTS, ONE, 1)
    assert walked == ["a", "b", "c"]


def test_the_answer_of_the_server_ends_a_generation(backend):
    with pytest.raises(ServerError, match="While generating, .* status 400: too long"):
        backend()._run([Request([9], 1, 1)], ONE)
