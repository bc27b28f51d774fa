from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trl.distributed import RankError, Ranks
from trl.generation.base import Sampling
from trl.generation.function_backend import FunctionBackend
from trl.types import Prompts

PROMPTS = Prompts(messages=["a", "b"], token_ids=[[10], [11]])
GOOD = {
    "prompt_ids": [[20, 21], [22]],
    "completion_ids": [[30, 31, 1], [32]],
    "logprobs": [[-0.1, -0.2, -0.3], [-0.4]],
}


def generate(found):
    backend = FunctionBackend(SimpleNamespace(), lambda prompts: found, Ranks())
    return backend.generate(PROMPTS, Sampling(max_tokens=4, stop_ids=(2, 1)), 2)


def test_the_function_gets_prompts():
    seen = []

    def function(prompts):
        seen.append(prompts)
        return GOOD

    engine = SimpleNamespace(sync_weights=lambda step: seen.append(step))
    backend = FunctionBackend(engine, function, Ranks())
    backend.sync_weights(7)
    found = backend.generate(PROMPTS, Sampling(max_tokens=4, stop_ids=(2, 1)), 2)
    assert seen == [7, ["a", "b"]]
    assert (found.prompt_ids, found.completion_ids) == (GOOD["prompt_ids"], GOOD["completion_ids"])
    assert found.sampling_logps == GOOD["logprobs"] and found.policy_mask is None
    assert found.finish_reasons == ["stop", "length"] and found.extra_columns == [{}, {}]
    assert found.completed_prompts(PROMPTS).token_ids == GOOD["prompt_ids"]
    assert not backend.reports_policy_logps


def test_the_function_cannot_change_the_prompts():
    def function(prompts):
        for messages in prompts:
            messages[0]["content"] = "changed"
        return GOOD

    messages = [[{"role": "user", "content": text}] for text in "ab"]
    prompts = Prompts(messages=messages, token_ids=[[10], [11]])
    backend = FunctionBackend(SimpleNamespace(), function, Ranks())
    backend.generate(prompts, Sampling(max_tokens=4, stop_ids=(2, 1)), 2)
    assert [row[0]["content"] for row in prompts.messages] == ["a", "b"]


def test_masks_and_columns():
    found = generate(GOOD | {"env_mask": [[1, 0, 1], [1]], "score": [0.5, None], "level": "hard"})
    assert found.policy_mask == [[True, False, True], [True]]
    assert found.with_extra_columns([{"x": 1, "score": 9}, {"x": 2}]) == [
        {"x": 1, "score": 0.5, "level": "hard"},
        {"x": 2, "score": None, "level": "hard"},
    ]


def test_lone_surrogates_in_columns_are_replaced():
    found = generate(GOOD | {"prompt": ["\ud83d", [{"content": "\ud83d\ude00"}]], "kind": "\ude00"})
    assert found.extra_columns == [
        {"prompt": "\ufffd", "kind": "\ufffd"},
        {"prompt": [{"content": "😀"}], "kind": "\ufffd"},
    ]


def test_arrays_and_tensors_are_lists():
    found = generate(
        {
            "prompt_ids": [np.array([20, 21]), torch.tensor([22])],
            "completion_ids": [torch.tensor([30, 31, 1]), [np.int64(32)]],
            "logprobs": [np.array([-0.5, -0.25, -1.0]), torch.tensor([-0.5])],
            "score": torch.tensor([1.0, 2.0]),
        }
    )
    assert found.completion_ids == GOOD["completion_ids"]
    assert {type(token) for row in found.completion_ids for token in row} == {int}
    assert found.sampling_logps == [[-0.5, -0.25, -1.0], [-0.5]]
    assert found.extra_columns == [{"score": 1.0}, {"score": 2.0}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": None}, "returned no logprobs; it must return .* but gave prompt_ids"),
        ({"completion_ids": [[30]]}, "completion_ids has 1 rows for 2 prompts"),
        ({"completion_ids": 5}, "completion_ids is 5; it must be a list"),
        ({"prompt_ids": [[20], []]}, "prompt_ids of row 1 is empty"),
        ({"completion_ids": [[30, 31, 1], ["x"]]}, "completion_ids of row 1 holds 'x'"),
        ({"completion_ids": [[30, 31, 1], [-1]]}, "completion_ids of row 1 holds -1"),
        ({"completion_ids": [[30, 31, 1], [True]]}, "completion_ids of row 1 holds True"),
        ({"completion_ids": [[30, 31, 1], 4]}, "completion_ids of row 1 is 4; it must be a list"),
        ({"logprobs": [[-0.1, -0.2], [-0.4]]}, "logprobs of row 0 has 2 entries for 3"),
        ({"logprobs": [[-0.1, -0.2, [-0.3]], [-0.4]]}, "logprobs of row 0 holds \\[-0.3\\]"),
        ({"env_mask": [[1, 1, 1], [2]]}, "env_mask of row 1 holds 2"),
        ({"env_mask": [[1, 1, 1], []]}, "env_mask of row 1 has 0 entries for 1"),
        ({"score": [1.0]}, "score has 1 rows for 2 prompts"),
    ],
)
def test_mistakes_name_key_and_row(change, words):
    with pytest.raises(ValueError, match=f"rollout_func.* {words}|rollout_func {words}"):
        generate(GOOD | change)


def test_the_result_must_be_a_dictionary():
    with pytest.raises(ValueError, match="returned a list; it must be a dictionary"):
        generate([1])


def test_its_own_errors_pass_through():
    backend = FunctionBackend(SimpleNamespace(), lambda prompts: 1 / 0, Ranks())
    with pytest.raises(ZeroDivisionError):
        backend.generate(PROMPTS, Sampling(max_tokens=4), 2)


def test_what_all_ranks_know_is_not_told_again():
    """The engine that a function uses has told them: none of them meets this one once more."""

    class Parted(Ranks):
        def gather_objects(self, value):
            raise AssertionError("no other rank is here")

    def function(prompts):
        raise RankError("Rank 1 failed in generation")

    backend = FunctionBackend(SimpleNamespace(), function, Parted())
    with pytest.raises(RankError, match="Rank 1 failed in generation"):
        backend.generate(PROMPTS, Sampling(max_tokens=4), 2)
