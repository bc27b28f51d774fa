import json
import sys

import pytest

from trl.cli.completions import main, read_records


def record(step, group, completion, reward, **changes):
    return {
        "step": step,
        "round": step,
        "group": group,
        "prompt": f"p{step}{group}=",
        "completion": completion,
        "finish": "eos",
        "reward": reward,
        "advantage": 0.5,
        "rewards": {"exact": reward},
    } | changes


RECORDS = [
    record(0, 0, "aa", 0.25),
    record(0, 0, "bb", 1.0),
    record(0, 1, "cc", None),
    record(1, 0, "dd", -2.0, finish="length"),
    record(1, 0, "ee", 0.75),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "completions").mkdir()
    lines = [json.dumps(r) for r in RECORDS]
    (tmp_path / "completions" / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "completions" / "eval.jsonl").write_text(json.dumps(record(9, 0, "zz", 1.0)))
    return tmp_path


def shown(capsys, *words):
    main([str(word) for word in words])
    output = capsys.readouterr().out
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows], output.splitlines()[-1]


def completions(rows):
    return [row[2] for row in rows]


def test_every_column(folder, capsys):
    rows, last = shown(capsys, folder)
    assert rows[0] == ["0", "p00=", "aa", "eos", "0.250", "0.250", "0.500"]
    assert rows[1][1] == "same"
    assert rows[2] == ["0", "p01=", "cc", "eos", "-", "-", "0.500"]
    assert rows[3][1:4] == ["p10=", "dd", "length"]
    assert last == "5 of 5 completions"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", 1], ["dd", "ee"]),
        (["--best", 2], ["bb", "ee"]),
        (["--worst", 2], ["dd", "aa"]),
        (["--best", 1, "--step", 1], ["ee"]),
        (["--worst", 99], ["dd", "aa", "ee", "bb"]),  # what has no reward is neither
        (["--split", "eval"], ["zz"]),
    ],
)
def test_selection(folder, capsys, words, expected):
    rows, last = shown(capsys, folder, *words)
    assert completions(rows) == expected
    assert last.startswith(f"{len(expected)} of ")


@pytest.mark.parametrize(
    ("step", "steps", "names"),
    [
        (7, [0, 1], "0, 1."),
        (77, range(0, 1000, 10), "0 to 990; the nearest are 80 and 70."),
    ],
)
def test_a_step_without_completions(tmp_path, capsys, step, steps, names):
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(record(found, 0, "a", 1.0)) for found in steps))
    with pytest.raises(SystemExit) as end:
        main([str(path), "--step", str(step)])
    message = f"--step {step} has no completions; the steps that have some are {names}"
    assert end.value.code == 2
    assert capsys.readouterr().err == f"trl completions: error: {message}\n"


def test_limit_says_what_it_hides(folder, capsys):
    rows, last = shown(capsys, folder, "--limit", 2)
    assert completions(rows) == ["aa", "bb"]
    assert last == "2 of 5 completions; 3 more match, see --limit"


def test_a_file_is_read_whatever_its_name(folder, capsys):
    rows, _ = shown(capsys, folder / "completions" / "eval.jsonl")
    assert completions(rows) == ["zz"]


def test_markup_of_a_completion_is_shown_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(record(0, 0, "[bold]x[/bold]", 1.0, prompt="[red]y")))
    rows, _ = shown(capsys, path)
    assert rows[0][1:3] == ["[red]y", "[bold]x[/bold]"]


def test_messages_are_shown_with_their_roles(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "c.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "there"}]
    path.write_text(json.dumps(record(0, 0, messages[:1], 1.0, prompt=messages)))
    rows, _ = shown(capsys, path)
    assert [row[1] for row in rows] == ["user: hi", "user: there"]
    assert rows[0][2] == "user: hi"


def test_a_run_without_completions(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path)])
    path = tmp_path / "completions" / "train.jsonl"
    message = f"trl completions: error: there are no completions at {path}.\n"
    assert (end.value.code, capsys.readouterr().err) == (2, message)


def test_a_damaged_line_is_named(folder):
    path = folder / "completions" / "train.jsonl"
    path.write_text(path.read_text() + '{"step": 1, "gr')
    assert len(read_records(folder, "train")) == 5, "the run is writing the last line"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match=r"line 6 of .*train\.jsonl is not valid JSON"):
        read_records(folder, "train")


@pytest.mark.parametrize("line", ['{"prompt": "x"}', "[1]", "3"])
def test_other_files_are_refused(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps(RECORDS[0])}\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*prompts\.jsonl is not a record"):
        read_records(path, "train")


def test_a_table_needs_rich(folder, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(SystemExit) as end:
        main([str(folder)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("trl completions: error: ")
    assert "needs the package `rich`" in error
    assert "pip install 'trl[" in error


def test_the_separators_of_unicode_do_not_split_a_record(tmp_path):
    path = tmp_path / "c.jsonl"
    texts = ["a\u2028b", "a\u0085b", "a\x0cb"]
    lines = [json.dumps(record(0, 0, text, 1.0), ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert [r["completion"] for r in read_records(path, "train")] == texts


def test_a_last_line_may_be_cut_inside_a_character(folder):
    file = folder / "completions" / "train.jsonl"
    count = len(read_records(folder, "train"))
    with file.open("ab") as lines:
        lines.write('{"step": 1, "prompt": "é'.encode()[:-1])
    assert len(read_records(folder, "train")) == count
