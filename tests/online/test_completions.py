import json
from datetime import date

from trl.online.completions import CompletionLog, print_table, tracker_rows
from trl.text import as_text


def record(step=0, prompt="p", completion="c", advantage=0.5, **extra):
    return {
        "step": step,
        "group": 0,
        "prompt": prompt,
        "completion": completion,
        "rewards": {"r": 1.0},
        "extra": extra,
        "advantage": advantage,
    }


def lines(folder, mode="train"):
    with (folder / "completions" / f"{mode}.jsonl").open() as file:
        return [json.loads(line) for line in file]


def test_rounds_are_appended_and_taken_once(tmp_path):
    log = CompletionLog(str(tmp_path), writes=True)
    log.add("train", [record(0)])
    log.add("train", [record(1), record(1)])
    log.add("eval", [record(1)])
    assert [r["step"] for r in lines(tmp_path)] == [0, 1, 1]
    assert len(log.take("train")) == 2 and log.take("train") == []
    assert len(log.take("eval")) == 1


def test_other_ranks_write_nothing(tmp_path):
    log = CompletionLog(str(tmp_path), writes=False)
    log.add("train", [record()])
    log.restart(0)
    assert list(tmp_path.iterdir()) == []


def test_restart_drops_later_steps_and_broken_lines(tmp_path):
    log = CompletionLog(str(tmp_path), writes=True)
    for step in range(4):
        log.add("train", [record(step, prompt="line\u2028separator")])
    with (tmp_path / "completions" / "train.jsonl").open("a") as file:
        file.write('{"step": 1, "prom')
    for step in (1, 2, 3):
        log.add("eval", [record(step)])
    log.restart(2)
    assert [r["step"] for r in lines(tmp_path)] == [0, 1]
    assert [r["step"] for r in lines(tmp_path, "eval")] == [1, 2], "evaluated before the checkpoint"


def test_table_shows_a_sample(capsys):
    records = [record(completion=f"text{i}", note="seen") for i in range(9)]
    print_table(records, step=5, count=2)
    shown = capsys.readouterr().out
    assert "Step 5" in shown and shown.count("text") == 2 and "seen" in shown and "0.50" in shown
    print_table(records, step=5, count=0)
    print_table([], step=5, count=None)
    assert "text" not in capsys.readouterr().out


def test_tracker_rows():
    records = [record(prompt="a", x=1), record(prompt="a", x=2), record(prompt="b", x=3)]
    columns, rows = tracker_rows(records, unique_prompts=False)
    assert columns == ["step", "prompt", "completion", "r", "x", "advantage"]
    assert rows[1] == [0, "a", "c", 1.0, 2, 0.5] and len(rows) == 3
    assert [row[1] for row in tracker_rows(records, unique_prompts=True)[1]] == ["a", "b"]
    assert tracker_rows([], False) == ([], [])


def test_values_json_does_not_have_are_written_as_text(tmp_path):
    log = CompletionLog(str(tmp_path), writes=True)
    log.add("train", [record(prompt="\u00e9\n\U0001f600", when=date(2024, 1, 2))])
    (found,) = lines(tmp_path)
    assert found["prompt"] == "\u00e9\n\U0001f600"
    assert found["extra"] == {"when": "2024-01-02"}
    assert "\u00e9" in (tmp_path / "completions" / "train.jsonl").read_text(encoding="utf-8")


def test_messages_are_shown_with_their_roles(capsys):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert as_text(chat) == "system: s\nuser: hi"
    assert as_text("text") == "text"
    print_table([record(prompt=chat, advantage=None)], step=1, count=None)
    shown = capsys.readouterr().out
    assert "user: hi" in shown
    assert "0.50" not in shown
