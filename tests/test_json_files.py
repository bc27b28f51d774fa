import json
import math
from pathlib import Path

import numpy
import pytest
import torch

from trl.json_files import JsonLinesFile, json_text, json_values, without_surrogates


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


# --- Lines that belong to steps ---


def test_later_steps_and_broken_lines_are_dropped(tmp_path):
    lines = JsonLinesFile(tmp_path / "folder" / "lines.jsonl")
    lines.drop_after(5)  # there is no file yet
    lines.add([{"step": 0, "text": "line\u2028separator"}, {"step": 2}])
    lines.add([{"step": 1, "folder": tmp_path}])
    with lines.path.open("a") as file:
        file.write('{"step": 1, "pro')
    lines.drop_after(1)
    kept = [json.loads(line) for line in lines.path.open(encoding="utf-8")]
    assert [line["step"] for line in kept] == [0, 1]
    assert kept[0]["text"] == "line\u2028separator" and kept[1]["folder"] == str(tmp_path)


def test_a_line_that_was_cut_inside_a_character_is_dropped(tmp_path):
    lines = JsonLinesFile(tmp_path / "lines.jsonl")
    lines.add([{"step": 0, "text": "é"}])
    with lines.path.open("ab") as file:
        file.write('{"step": 1, "text": "é'.encode()[:-1])
    assert [line["step"] for line in lines.read()] == [0]
    lines.drop_after(5)
    assert lines.path.read_text(encoding="utf-8") == '{"step": 0, "text": "é"}\n'


def test_what_json_or_utf8_cannot_hold_is_replaced(tmp_path):
    lines = JsonLinesFile(tmp_path / "lines.jsonl")
    lines.add([{"step": 0, "text": ["\ud83d"], "extra": {"score": math.nan}}])
    line = json.loads(lines.path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert line == {"step": 0, "text": ["\ufffd"], "extra": {"score": None}}
