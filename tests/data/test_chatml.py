"""Converting turns written with `from` and `value`."""

import copy

import pytest

from trl.data.chatml import maybe_convert_to_chatml

OLD = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
NEW = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("column", ["prompt", "completion", "chosen", "rejected", "messages"])
def test_each_column_is_renamed(column):
    assert maybe_convert_to_chatml({column: OLD, "n": 3}) == {column: NEW, "n": 3}


def test_conversations_become_messages():
    assert maybe_convert_to_chatml({"conversations": OLD}) == {"messages": NEW}
    assert maybe_convert_to_chatml({"conversations": NEW}) == {"messages": NEW}


def test_other_fields_of_a_turn_are_kept():
    turn = {"from": "user", "value": "a", "weight": 0}
    found = maybe_convert_to_chatml({"messages": [turn]})
    assert found == {"messages": [{"role": "user", "content": "a", "weight": 0}]}


@pytest.mark.parametrize(
    "example",
    [
        {"prompt": "from value", "completion": "x"},
        {"messages": NEW},
        {"prompt": ["a", "b"]},
        {"other": OLD},
        {"prompt": None},
        {"prompt": []},
        {},
    ],
)
def test_other_formats_are_unchanged(example):
    before = copy.deepcopy(example)
    found = maybe_convert_to_chatml(example)
    assert found == before == example
    assert found is not example


def test_the_example_itself_is_not_modified():
    example = {"conversations": copy.deepcopy(OLD), "chosen": copy.deepcopy(OLD)}
    maybe_convert_to_chatml(example)
    assert example == {"conversations": OLD, "chosen": OLD}
