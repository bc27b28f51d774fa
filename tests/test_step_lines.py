import json
import math

import pytest

from trl.step_lines import StepLines


def test_later_steps_and_broken_lines_are_dropped(tmp_path):
    lines = StepLines(tmp_path / "folder" / "lines.jsonl")
    lines.keep_until(5)  # there is no file yet
    lines.add([{"step": 0, "text": "line\u2028separator"}, {"step": 2}])
    lines.add([{"step": 1, "folder": tmp_path}])
    with lines.path.open("a") as file:
        file.write('{"step": 1, "pro')
    lines.keep_until(1)
    kept = [json.loads(line) for line in lines.path.open(encoding="utf-8")]
    assert [line["step"] for line in kept] == [0, 1]
    assert kept[0]["text"] == "line\u2028separator" and kept[1]["folder"] == str(tmp_path)


def test_a_line_that_was_cut_inside_a_character_is_dropped(tmp_path):
    lines = StepLines(tmp_path / "lines.jsonl")
    lines.add([{"step": 0, "text": "é"}])
    with lines.path.open("ab") as file:
        file.write('{"step": 1, "text": "é'.encode()[:-1])
    assert [line["step"] for line in lines.read()] == [0]
    lines.keep_until(5)
    assert lines.path.read_text(encoding="utf-8") == '{"step": 0, "text": "é"}\n'


def test_what_json_or_utf8_cannot_hold_is_replaced(tmp_path):
    lines = StepLines(tmp_path / "lines.jsonl")
    lines.add([{"step": 0, "text": ["\ud83d"], "extra": {"score": math.nan}}])
    line = json.loads(lines.path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert line == {"step": 0, "text": ["\ufffd"], "extra": {"score": None}}
