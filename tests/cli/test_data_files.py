"""Data files that cannot be read: which file, which line, and what is wrong there."""

import datasets
import pytest

from trl.cli.data_files import check_encoding, load_files


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


LATIN = "is not UTF-8: byte 0xe9, 'é' in latin-1; save it as UTF-8, for example with `iconv"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"a": "b"}\n{"a": "caf\xe9"}\n', f"line 2 of a.jsonl {LATIN}"),
        ("a.json", b'[{"a": "caf\xe9"}]', f"line 1 of a.json {LATIN}"),
        ("a.csv", b"a\ncaf\xe9\n", f"line 2 of a.csv {LATIN}"),
        ("a.txt", b"caf\xe9", f"line 1 of a.txt {LATIN}"),
        ("a.jsonl", '{"a": "b"}\n'.encode("utf-16"), "a.jsonl is UTF-16; save it as UTF-8"),
        (
            "a.jsonl",
            b'{"a": 1},\n{"a": 2},\n',
            "line 1 of a.jsonl ends with a comma, but JSON Lines has none between rows; remove it",
        ),
        (
            "a.jsonl",
            b'{"a": 1}\n\n{"a": [2,]}\n',
            "line 3 of a.jsonl has a comma before a closing bracket; remove it",
        ),
        (
            "a.jsonl",
            b'{"a": 1}\n{"a": "b',
            "line 2 of a.jsonl is not valid JSON: Unterminated string starting at",
        ),
        (
            "a.json",
            b'[{"a": 1},\n{"a": 2},\n]',
            "line 2 of a.json has a comma before a closing bracket; remove it",
        ),
        ("a.json", b'[{"a": 1},\n{"a" 2}]', "line 2 of a.json is not valid JSON: Expecting ':'"),
    ],
)
def test_a_broken_line_is_named(tmp_path, name, content, reason, streaming):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_files("--dataset_name x", {"train": [str(tmp_path / name)]}, streaming)
    assert str(caught.value).startswith(f"--dataset_name x: cannot be read ({reason}")
    assert "\n" not in str(caught.value)


def test_the_broken_one_of_several_files_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "test.jsonl").write_text('{"a": 1}\n{"a": }\n')
    files = {name: [str(tmp_path / f"{name}.jsonl")] for name in ("train", "test")}
    with pytest.raises(ValueError, match=r"\(line 2 of test.jsonl is not valid JSON: Expecting"):
        load_files("here", files)


def test_characters_across_chunks_are_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.cli.data_files.CHUNK_BYTES", 3)
    path = tmp_path / "a.txt"
    path.write_text("caf\u00e9 \U0001f600", encoding="utf-8")
    check_encoding("here", [path])
    path.write_bytes("caf\u00e9".encode()[:-1])
    with pytest.raises(ValueError, match=r"line 1 of a.txt is not UTF-8"):
        check_encoding("here", [path])
