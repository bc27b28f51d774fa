"""Rewards for the right mathematical answer."""

import pickle
import threading

import pytest

pytest.importorskip("math_verify")

from trl.rewards.accuracy import SKIPPED, UNPARSEABLE, accuracy_reward, reasoning_accuracy_reward


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("wrap", [str, said])
def test_right_wrong_and_equivalent_answers(wrap):
    texts = [r"\boxed{4}", r"\boxed{5}", r"\boxed{\frac{2}{4}}", "no answer at all", "$4$"]
    solutions = ["$4$", "$4$", r"$\frac{1}{2}$", "$4$", "$4$"]
    found = accuracy_reward([wrap(text) for text in texts], solutions)
    assert found == [1.0, 0.0, 1.0, 0.0, 0.0], "a bare formula is no answer"
    assert all(type(reward) is float for reward in found)


def test_a_solution_that_cannot_be_parsed_gives_none():
    assert accuracy_reward([r"\boxed{4}", r"\boxed{4}"], ["", "$4$"]) == [None, 1.0]


def test_units_and_boxed_answers_come_first():
    texts = [r"It is $7$, no: \boxed{3}", r"\boxed{3 \text{ cm}}"]
    assert accuracy_reward(texts, ["$3$", "$3$"]) == [1.0, 1.0]


def test_log_extra_receives_what_was_compared():
    columns = {}
    accuracy_reward(
        [r"\boxed{4}", "nothing", "x"], ["$4$", "$5$", ""], log_extra=columns.__setitem__, other=1
    )
    assert list(columns) == ["solution", "gold_parsed", "answer_parsed"]
    assert columns["solution"] == ["$4$", "$5$", ""]
    assert columns["gold_parsed"] == ["[4, '4']", "[5, '5']", UNPARSEABLE]
    assert columns["answer_parsed"] == ["[4, '4']", UNPARSEABLE, SKIPPED]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="zip"):
        accuracy_reward([r"\boxed{4}"], ["$4$", "$4$"])


def test_answers_are_graded_outside_the_main_thread():
    """Time limits by signals would fail there."""
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(accuracy_reward([r"\boxed{4}", r"\boxed{5}"], ["$4$", "$4$"]))
    )
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


@pytest.mark.parametrize("wrap", [str, said])
def test_reasoning_counts_only_what_follows(wrap):
    texts = [
        r"<think>\boxed{5}</think>\boxed{4}",
        r"<think>\boxed{4}</think>\boxed{5}",
        r"<think>\boxed{4}",
        r"a</think>\boxed{5}</think>\boxed{4}",
    ]
    found = reasoning_accuracy_reward([wrap(text) for text in texts], ["$4$"] * 4)
    assert found == [1.0, 0.0, 0.0, 1.0]


def test_reasoning_delimiters_in_their_order():
    """The first delimiter of the list that occurs decides, wherever it stands."""
    text = r"a<b>\boxed{1}<a>\boxed{2}"
    solutions = ["$2$"]
    assert reasoning_accuracy_reward([text], solutions, ["<a>", "<b>"]) == [1.0]
    assert reasoning_accuracy_reward([text], solutions, ["<b>", "<a>"]) == [0.0]
    assert reasoning_accuracy_reward([text], solutions, ["<c>", "<a>"]) == [1.0]
    assert reasoning_accuracy_reward([text], solutions, []) == [0.0]


def test_reasoning_without_an_end_is_logged_as_skipped():
    columns = {}
    texts = [r"\boxed{4}", r"</think>\boxed{4}", "</think>?"]
    found = reasoning_accuracy_reward(texts, ["$4$", "", "$4$"], log_extra=columns.__setitem__)
    assert found == [0.0, None, 0.0]
    assert columns == {
        "solution": ["$4$", "", "$4$"],
        "gold_parsed": [SKIPPED, UNPARSEABLE, "[4, '4']"],
        "answer_parsed": [SKIPPED, SKIPPED, UNPARSEABLE],
    }


@pytest.mark.parametrize("reward", [accuracy_reward, reasoning_accuracy_reward])
def test_rewards_survive_pickling(reward):
    assert pickle.loads(pickle.dumps(reward))([r"</think>\boxed{4}"], ["$4$"]) == [1.0]
