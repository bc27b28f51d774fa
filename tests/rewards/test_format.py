"""Rewards for the form of a completion."""

import pickle

import pytest

from trl.rewards.format import text_of, think_format_reward


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


def test_reward_survives_pickling():
    assert pickle.loads(pickle.dumps(think_format_reward))(["<think>a</think>"]) == [1.0]
