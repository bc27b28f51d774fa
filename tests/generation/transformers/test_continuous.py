from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_model

from trl.generation.base import Sampling
from trl.generation.transformers.backend import TransformersBackend
from trl.generation.transformers.continuous import ContinuousBackend
from trl.generation.transformers.sampler import NonFiniteLogitsError
from trl.types import Prompts

PROMPTS = Prompts(
    messages=["a", "a", "bb", "ccc"], token_ids=[[20], [20], [21, 22], [23, 24, 25, 26]]
)
# Requests wait, enter one after another, and long prompts are read in parts.
CROWDED = {"max_batch_tokens": 2, "page_size": 4, "num_blocks": 16, "max_requests_per_batch": 2}


def sampling(**changes) -> Sampling:
    return Sampling(**({"max_tokens": 8, "stop_ids": (1, 40), "seeds": (1, 2, 3, 4)} | changes))


def continuous(model, **options) -> ContinuousBackend:
    return ContinuousBackend(lambda: nullcontext(model), pad_id=0, options=options)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {}),
        ({"min_p": 0.02, "stop_ids": (1, 40, 50, 60)}, CROWDED),
        ({"extra": {"do_sample": False}, "max_tokens": 5, "stop_ids": ()}, {}),
    ],
    ids=["filters", "crowded, several stop tokens", "greedy"],
)
def test_completions_are_those_of_the_default_backend(changes, options):
    model, drawn = tiny_model().eval(), sampling(**changes)
    usual = TransformersBackend(
        lambda: nullcontext(model), pad_id=0, device=torch.device("cpu")
    ).generate(PROMPTS, drawn, 2)
    found = continuous(model, **options).generate(PROMPTS, drawn, 2)
    assert (
        found.completion_ids == usual.completion_ids
        and found.finish_reasons == usual.finish_reasons
    )


def test_the_model_and_the_random_numbers_stay_as_they_are():
    model = tiny_model().eval()
    model.set_attn_implementation("eager")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    continuous(model).generate(PROMPTS, sampling(), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == "eager"
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty: continuous batching does not"),
        ({"extra": {"no_repeat_ngram_size": 2}}, "no_repeat_ngram_size: continuous batching"),
    ],
)
def test_options_it_cannot_honor(changes, words):
    with pytest.raises(ValueError, match=words):
        continuous(tiny_model()).generate(PROMPTS, sampling(**changes), 2)


def test_unknown_options():
    with pytest.raises(ValueError, match="'page_sise'.*Did you mean page_size"):
        continuous(tiny_model(), page_sise=4)


def test_a_model_without_a_distribution_is_an_error():
    model = tiny_model().eval()
    with torch.no_grad():
        model.lm_head.weight[50] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match="logits of row 0, 1, 2, 3 are NaN"):
        continuous(model).generate(PROMPTS, sampling(), 2)


def test_failures_of_the_engine_are_raised():
    model = tiny_model().eval()
    model.model.layers[0].forward = None
    with pytest.raises(RuntimeError, match="Continuous batching"):
        continuous(model).generate(PROMPTS, sampling(), 2)
    assert model.config._attn_implementation == "sdpa"
