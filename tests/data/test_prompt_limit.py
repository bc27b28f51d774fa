import pytest

from trl.data.prompt_limit import PromptLimit, malformed_prompt


def limit(longest=None, action="error", context=20, completion=8):
    return PromptLimit.of(longest, action, context, completion)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 19),
        ({"action": "drop"}, 12),
        ({"action": "cut-left"}, 12),
        ({"longest": 15}, 15),
        ({"longest": 15, "action": "drop"}, 15),
        ({"longest": 50}, 19),
        ({"context": None}, None),
        ({"context": None, "action": "drop"}, None),
        ({"context": None, "longest": 50}, 50),
    ],
)
def test_where_the_limit_comes_from(given, tokens):
    """20 tokens of context leave 19 for a prompt that may have any completion, 12 for one of 8."""
    assert limit(**given).tokens == tokens


def test_what_becomes_of_a_long_prompt():
    ids = list(range(21))
    assert limit(5, "cut-left").cut(ids) == [16, 17, 18, 19, 20]
    assert limit(5, "drop").cut(ids) == ids
    for action in ("drop", "cut-left"):
        assert limit(5, action).is_broken_by(ids) and limit(5, action).problem(ids) is None
        assert "no tokens" in limit(5, action).problem([])
    assert limit(21, context=None).problem(ids) is None
    assert "has 21 tokens; at most 5 are possible (max_prompt_length=5)" in limit(5).problem(ids)
    assert "the model sees 20 tokens" in limit().problem(ids)
    assert limit(context=None).cut(ids) == ids


def test_the_form_of_prompts():
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    for good in ("", "a", [{"role": "user", "content": "a"}, call]):
        assert malformed_prompt(good) is None
    for bad in (None, 3, [], ["a"], [{"content": "a"}], [call, {"role": "user", "content": None}]):
        assert malformed_prompt(bad)
