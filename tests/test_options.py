"""Declaring options."""

import dataclasses
from dataclasses import dataclass

import pytest

from trl.options import changed_options, option

WORDS = ["a"]


@dataclass
class Options:
    number: int = option(3, "A number.")
    words: list = option(WORDS, "Words.")
    kind: str = option("x", "A kind.", choices=("x", "y"))
    nothing: int | None = option(None, "Nothing.")


def test_defaults():
    found = Options()
    assert (found.number, found.words, found.kind, found.nothing) == (3, ["a"], "x", None)
    assert Options(number=4).number == 4


def test_lists_are_copied_for_each_instance():
    first, second = Options(), Options()
    first.words.append("b")
    assert second.words == ["a"] == WORDS == Options().words


def test_metadata_serves_the_command_line():
    found = {field.name: dict(field.metadata) for field in dataclasses.fields(Options)}
    assert found == {
        "number": {"help": "A number."},
        "words": {"help": "Words."},
        "kind": {"help": "A kind.", "choices": ["x", "y"]},
        "nothing": {"help": "Nothing."},
    }


def test_each_instance_of_a_field_has_its_own_choices():
    choices = ("x", "y")
    first, second = option("x", "A.", choices), option("x", "B.", choices)
    assert first.metadata["choices"] == second.metadata["choices"] == ["x", "y"]
    assert first.metadata["choices"] is not second.metadata["choices"]


def test_ranges_that_are_spelled_wrongly_are_found():
    with pytest.raises(TypeError, match="minimum"):
        option(1, "A number.", minimum=0)


def test_options_that_were_changed_are_named():
    assert changed_options(Options(kind="y", number=4), ["nothing", "kind", "number"]) == [
        "kind",
        "number",
    ]
    assert changed_options(Options(number=3), ["nothing", "kind", "number"]) == []
