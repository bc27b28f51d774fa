from types import SimpleNamespace

import pytest

from trl.generation.base import Sampling
from trl.generation.vllm.sampling import (
    SEED_LIMIT,
    CompletionRequest,
    make_requests,
    merge_options,
    needs_detokenizer,
    read_outputs,
    sampling_arguments,
)
from trl.types import prefixes_of

KNOWN = ("n", "temperature", "top_p", "stop", "stop_token_ids", "presence_penalty", "logprobs")


def merged(**extra):
    return merge_options(Sampling(max_tokens=8, stop_ids=(1,), extra=extra), KNOWN)


def test_named_options_win_and_the_rest_stays():
    found = merged(temperature=0.5, max_new_tokens=3, presence_penalty=1.0, do_sample=False)
    assert (found.temperature, found.max_tokens) == (0.5, 3)
    assert found.extra == {"presence_penalty": 1.0, "do_sample": False}
    assert merge_options(found, KNOWN) == found


def test_stop_ids_add_up_and_strings_need_text():
    found = merged(stop_token_ids=[1, 7], stop_strings=["x"])
    assert found.stop_ids == (1, 7) and found.extra == {"stop": ["x"]}
    assert needs_detokenizer(found) and not needs_detokenizer(merged())


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"temprature": 1}, r"not a sampling option of vLLM.*[Dd]id you mean.*temperature"),
        ({"n": 2}, "'n'. cannot be used in training"),
        ({"logprobs": 2}, "cannot be used in training"),
    ],
)
def test_unknown_and_refused_options(extra, words):
    with pytest.raises(ValueError, match=words):
        merged(**extra)


def test_arguments_of_a_request():
    sampling = Sampling(max_tokens=8, temperature=0.7, top_k=5, stop_ids=(1, 2))
    found = sampling_arguments(sampling, 4, 2**63 - 1)
    assert (found["n"], found["temperature"], found["top_k"], found["min_p"]) == (4, 0.7, 5, 0.0)
    assert found["stop_token_ids"] == [1, 2] and found["ignore_eos"] and found["logprobs"] == 0
    assert 0 <= found["seed"] < SEED_LIMIT and found["seed"] + 16384 < 2**63
    assert not found["detokenize"]
    greedy = sampling_arguments(merged(do_sample=False, stop=["x"]), 4, 0)
    assert (greedy["n"], greedy["temperature"]) == (1, 0.0)
    assert greedy["detokenize"] and "do_sample" not in greedy


def test_a_request_for_each_run_of_a_prompt():
    rows = [[5], [5], [6, 7], [5]]
    expected = [
        CompletionRequest([5], 2, 10),
        CompletionRequest([6, 7], 1, 12),
        CompletionRequest([5], 1, 13),
    ]
    assert make_requests(prefixes_of(rows), (10, 11, 12, 13)) == expected
    assert make_requests([], ()) == []


def output(index, ids, reason="stop"):
    logps = [{token: SimpleNamespace(logprob=-token / 10)} for token in ids]
    return SimpleNamespace(index=index, token_ids=ids, logprobs=logps, finish_reason=reason)


def test_answers_are_read_in_the_order_of_rows():
    answers = [
        SimpleNamespace(outputs=[output(1, [4]), output(0, [2, 3], "length")]),
        SimpleNamespace(outputs=[output(0, [5])]),
    ]
    requests = [CompletionRequest([9], 2, 0), CompletionRequest([8], 1, 0)]
    found = read_outputs(requests, answers)
    assert found.completion_ids == [[2, 3], [4], [5]]
    assert found.finish_reasons == ["length", "stop", "stop"]
    assert found.sampling_logps == [[-0.2, -0.3], [-0.4], [-0.5]]


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_request_that_was_given_up_is_no_completion(reason):
    with pytest.raises(RuntimeError, match="instead of 'stop' or 'length'"):
        read_outputs(
            [CompletionRequest([9], 1, 0)], [SimpleNamespace(outputs=[output(0, [5], reason)])]
        )


def test_one_greedy_answer_stands_for_the_group():
    found = read_outputs(
        [CompletionRequest([9], 3, 0)], [SimpleNamespace(outputs=[output(0, [5])])]
    )
    assert found.completion_ids == [[5]] * 3 and found.sampling_logps == [[-0.5]] * 3
