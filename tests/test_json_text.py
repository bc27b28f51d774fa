import json
import math
from pathlib import Path

import numpy
import pytest
import torch

from trl.json_text import json_text, json_values, without_surrogates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, ünïcode 😀", "plain, ünïcode 😀"),
        ("\ud83d", "\ufffd"),
        ("a\ude00b", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d\ud83d\ude00", "\ufffd😀"),
    ],
)
def test_lone_surrogates_are_replaced(text, expected):
    assert without_surrogates(text) == expected
    expected.encode()


def test_values_of_any_kind_become_valid_json():
    value = {
        "number": math.nan,
        "list": [math.inf, (-math.inf, 1.5)],
        "numpy": numpy.float32("nan"),
        "tensor": torch.tensor(0.5),
        "text": {"\ud83d": "\ude00"},
        math.nan: 1,
        (1, 2): 2,
    }
    text = json_text(value)
    text.encode()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "number": None,
        "list": [None, [None, 1.5]],
        "numpy": None,
        "tensor": 0.5,
        "text": {"\ufffd": "\ufffd"},
        "nan": 1,
        "(1, 2)": 2,
    }


def test_other_objects_are_written_as_text():
    assert json.loads(json_text([Path("a"), {1}, True, None])) == ["a", "{1}", True, None]
    assert json_values([True, None, 3, "x"]) == [True, None, 3, "x"]
    assert json_text({"b": 1, "a": "é"}, sort_keys=True, indent=1) == '{\n "a": "é",\n "b": 1\n}'
