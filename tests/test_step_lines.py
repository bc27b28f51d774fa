import json

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
