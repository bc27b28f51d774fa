import os
import typing
from enum import Enum
from typing import Any, Literal

import pytest

from trl.cli.values import ConversionError, convert, read_config


class Color(Enum):
    RED = "red"


class When(Enum):
    NEVER = "no"
    ALWAYS = "always"


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("3", int, 3),
        ("1e-6", float, 1e-6),
        (3, float, 3.0),
        ("-1e3", float, -1000.0),
        ("true", bool, True),
        ("No", bool, False),
        (True, bool, True),
        ("none", int | None, None),
        ("null", float | None, None),
        (None, int | None, None),
        ("none", str | None, "none"),
        (["none"], tuple[float, float] | None, None),
        (["null"], list[float] | None, None),
        (["none"], list[str] | str | None, "none"),
        (["none", "none"], list[str] | None, ["none", "none"]),
        ("5", int | str | None, 5),
        ("auto", int | str | None, "auto"),
        ("false", str, "false"),
        (False, str, "false"),
        (["-1", "1"], tuple[float, float] | None, (-1.0, 1.0)),
        ([1, 2], tuple[float, float], (1.0, 2.0)),
        (["1", "2"], list[float] | None, [1.0, 2.0]),
        ("1", list[float], [1.0]),
        (["all-linear"], list[str] | str | None, "all-linear"),
        (["a", "b"], list[str] | str | None, ["a", "b"]),
        ('{"a": 1}', dict, {"a": 1}),
        ({"a": 1}, dict[str, Any] | str | None, {"a": 1}),
        ("b", Literal["a", "b"], "b"),
        ("red", Color | str, "red"),
        (False, When | str, "no"),  # what YAML makes of the word no
        (3.0, int, 3),
        # YAML 1.1 reads these numbers as text.
        ("1e-5", float | None, 1e-5),
        ("1e3", int, 1000),
        ("1.5e1", int | None, 15),
        (["1e-1", 2, "3"], list[float] | None, [0.1, 2.0, 3.0]),
        (["-1e1", "1e1"], tuple[float, float] | None, (-10.0, 10.0)),
        ({"a": "1e-6", "b": [{"c": "2e1"}]}, dict | str | None, {"a": 1e-6, "b": [{"c": 20.0}]}),
        ({"a": "1e-6"}, dict[str, float], {"a": 1e-6}),
        ({"a": "1"}, dict[str, Any], {"a": "1"}),  # in quotes
        ({"revision": "12345e6"}, dict, {"revision": "12345e6"}),  # of a commit
        ('{"a": "1e-6"}', dict, {"a": "1e-6"}),
        ("1e5", str | None, "1e5"),
        ("path.json", dict | str | None, "path.json"),
        (' {"a": null}', dict | str | None, {"a": None}),
        ("2", typing.Union[int, None], 2),  # noqa: UP007
    ],
)
def test_conversions(value, annotation, expected):
    found = convert(value, annotation)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "words"),
    [
        ("abc", float, "'abc' is not a number"),
        ("1.5", int, "not an integer"),
        (1.5, int, "not an integer"),
        (True, int, "not an integer"),
        ("1e-1", int, "'1e-1' is not an integer"),
        ({"a": "x"}, dict[str, float], "'x' is not a number"),
        ("maybe", bool, "neither true nor false"),
        ("nan", float, "NaN"),
        (["1"], tuple[float, float], "2 values are needed, not 1"),
        ("{", dict, "not a JSON object"),
        ("c", Literal["a", "b"], "not one of a, b"),
        ({"a": 1}, str, "not text"),
        ("blue", Color | str, "'blue' is not one of red"),
        (True, When | str, "True is not one of no, always"),
        ('{"a": 1', dict | str | None, r"not a JSON object \(Expecting"),
        (float("inf"), int, "inf is not an integer"),
        ([1, 2], int, "not an integer"),
        ([1, 2], float, "not a number"),
        (None, float, "a value is needed"),
        (None, str, "a value is needed"),
    ],
)
def test_errors_say_what_is_wrong(value, annotation, words):
    with pytest.raises(ConversionError, match=words):
        convert(value, annotation)


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_names_have_underscores_and_the_environment_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_TEST_VALUE", "before")
    text = "max-steps: 1\nbeta: 0.5\nenv: {TRL_TEST_VALUE: 7}\nlr_scheduler_kwargs: {a-b: 1}\n"
    expected = {"max_steps": 1, "beta": 0.5, "lr_scheduler_kwargs": {"a-b": 1}}
    assert read_config(write(tmp_path, text)) == expected
    assert os.environ["TRL_TEST_VALUE"] == "7"
    assert read_config(write(tmp_path, "")) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "beta: 1\nseed: 2\nbeta: 1\n",
            "is not valid YAML: the key beta is given twice, in lines 1 and 3.",
        ),
        ("{beta: 1, beta: 2}", "is not valid YAML: the key beta is given twice, in lines 1 and 1."),
        (
            "seed: 1\nenv:\n  A: 1\n  A: 2\n",
            "is not valid YAML: the key A is given twice, in lines 3 and 4.",
        ),
        ("max_steps: 1\nmax-steps: 2\n", "has the key max_steps twice, once with hyphens."),
    ],
)
def test_a_key_that_stands_twice_is_an_error(tmp_path, text, problem):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_config(path)
    assert str(error.value) == f"{path} {problem}"


def test_a_merged_mapping_may_be_overruled(tmp_path):
    text = "a: &one {x: 1, y: 2}\nb: {<<: *one, x: 3}\n"
    assert read_config(write(tmp_path, text))["b"] == {"x": 3, "y": 2}
