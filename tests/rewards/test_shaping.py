"""Rewards that shape form, length and repetition."""

import dataclasses
import pickle

import pytest

from trl.rewards.accuracy import text_of
from trl.rewards.shaping import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)


def of_length(*lengths):
    return [[7] * length for length in lengths]


def test_soft_overlong_punishment():
    """Free up to 6 tokens; then a quarter for each one more; -1 from 10 on."""
    reward = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    found = reward(completion_ids=of_length(0, 6, 7, 8, 9, 10, 11, 99), prompts=[])
    assert found == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]


def test_soft_overlong_punishment_without_a_slope():
    reward = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=0)
    assert reward(completion_ids=of_length(9, 10, 11)) == [0.0, 0.0, -1.0]


def test_cosine_scaled_reward():
    """From 1 to 0.5 when right, from -1 to -0.5 when wrong, along a half cosine of 30 tokens."""
    pytest.importorskip("math_verify")
    reward = get_cosine_scaled_reward(max_len=30)
    lengths = of_length(0, 10, 15, 30, 60)
    right = reward([r"\boxed{4}"] * 5, ["$4$"] * 5, lengths)
    wrong = reward([r"\boxed{5}"] * 5, ["$4$"] * 5, lengths)
    # A third of the way the half cosine has done (1 - cos(60 degrees)) / 2 = 1/4 of its way.
    assert right == pytest.approx([1.0, 0.875, 0.75, 0.5, 0.5])
    assert wrong == pytest.approx([-1.0, -0.875, -0.75, -0.5, -0.5])


def test_cosine_scaled_reward_of_other_values_and_unknown_answers():
    pytest.importorskip("math_verify")
    reward = get_cosine_scaled_reward(20, -10.0, -2.0, 3.0, 7.0)
    texts = [r"\boxed{4}", r"\boxed{4}", r"\boxed{5}", r"\boxed{5}", r"\boxed{4}"]
    solutions = ["$4$", "$4$", "$4$", "$4$", ""]
    found = reward(texts, solutions, of_length(0, 20, 0, 20, 3), prompts=[])
    assert found == pytest.approx([7.0, 3.0, -10.0, -2.0, None])


def test_repetition_penalty():
    reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-2.0)
    rows = [
        [],
        [1],
        [1, 2, 3],  # 12 23: all differ
        [1, 2, 1, 2],  # 12 21 12: one of three repeated
        [1, 1, 1, 1, 1],  # 11 four times: three of four repeated
    ]
    found = reward(completion_ids=rows, prompts=[])
    assert found == pytest.approx([0.0, 0.0, 0.0, -2 / 3, -1.5])


def test_repetition_penalty_defaults_to_three_tokens():
    """Repeated pairs cost nothing; 123 231 312 123 repeats one of four."""
    found = get_repetition_penalty_reward()(completion_ids=[[1, 2, 1, 2], [1, 2, 3, 1, 2, 3]])
    assert found == pytest.approx([0.0, -0.25])


def test_repetition_penalty_must_not_reward():
    with pytest.raises(ValueError, match=r"max_penalty=0\.5 must be 0 or negative"):
        get_repetition_penalty_reward(max_penalty=0.5)
    assert get_repetition_penalty_reward(1, 0.0)(completion_ids=[[1, 1]]) == [0.0]


REWARDS = {
    "soft_overlong_punishment_reward": get_soft_overlong_punishment(10, 4),
    "cosine_scaled_reward": get_cosine_scaled_reward(10),
    "repetition_penalty_reward": get_repetition_penalty_reward(2),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_have_names_and_survive_pickling(name):
    reward = REWARDS[name]
    again = pickle.loads(pickle.dumps(reward))
    assert reward.__name__ == again.__name__ == name
    assert again == reward
    assert again is not reward
    with pytest.raises(dataclasses.FrozenInstanceError):
        reward.max_penalty = 1.0


def test_a_pickled_reward_scores_the_same():
    rows = of_length(5, 7, 9, 12)
    reward = REWARDS["soft_overlong_punishment_reward"]
    found = pickle.loads(pickle.dumps(reward))(completion_ids=rows)
    assert found == reward(completion_ids=rows) == [0.0, -0.25, -0.75, -1.0]


# --- Form ---


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>b", 1.0),
        ("<think></think>", 1.0),
        ("<think>a\nb</think>\nc\n", 1.0),
        ("<think>a</think>b</think>c", 1.0),
        (" <think>a</think>b", 0.0),
        ("<think>a", 0.0),
        ("a</think>b", 0.0),
        ("a", 0.0),
        ("", 0.0),
        ("<think><think>a</think>b", 0.0),
        ("<think>a</think><think>b</think>", 0.0),
        ("<think>a\n<think>b</think>", 0.0),
        ("<Think>a</Think>", 0.0),
    ],
)
def test_one_block_at_the_beginning(text, reward):
    message = [{"role": "assistant", "content": text}]
    assert think_format_reward([text], other=1) == [reward]
    assert think_format_reward([message]) == [reward]


def test_each_completion_has_its_own_reward():
    assert think_format_reward(["<think>a</think>", "a", "<think></think>a"]) == [1.0, 0.0, 1.0]
    assert think_format_reward([]) == []


def test_text_is_that_of_the_first_message():
    assert text_of("a") == "a"
    assert text_of([{"content": "a"}, {"content": "b"}]) == "a"
    calls = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert [text_of(x) for x in (calls, [{"role": "assistant"}], [], None)] == ["", "", "", ""]


def test_reward_survives_pickling():
    assert pickle.loads(pickle.dumps(think_format_reward))(["<think>a</think>"]) == [1.0]
