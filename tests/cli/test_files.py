"""Datasets by name."""

import json
import shutil

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl.cli.files import load_dataset_source

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b,c", "answer": 2}]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows=ROWS):
    """Write rows in the format that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix in (".csv", ".tsv"):
        comma = "," if path.suffix == ".csv" else "\t"
        lines = [f"prompt{comma}answer"]
        lines += [f'"{row["prompt"]}"{comma}{row["answer"]}' for row in rows]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".arrow":
        Dataset.from_list(rows).save_to_disk(path.parent / "saved")
        shutil.move(path.parent / "saved" / "data-00000-of-00001.arrow", path)
        shutil.rmtree(path.parent / "saved")
    else:
        Dataset.from_list(rows).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "tsv", "parquet", "arrow"])
def test_a_file_is_the_training_split(tmp_path, suffix, streaming):
    found = load_dataset_source(write(tmp_path / f"d.{suffix}"), streaming=streaming)
    assert list(found) == ["train"]
    assert list(found["train"]) == ROWS
    assert isinstance(found["train"], IterableDataset if streaming else Dataset)


@pytest.mark.parametrize("streaming", [False, True])
def test_lines_of_a_text_file_are_rows(tmp_path, streaming):
    (tmp_path / "rows.txt").write_text("one\ntwo, three\n")
    found = load_dataset_source(str(tmp_path / "rows.txt"), streaming=streaming)
    assert list(found["train"]) == [{"text": "one"}, {"text": "two, three"}]


def test_texts_beside_data_are_no_data(tmp_path):
    write(tmp_path / "train.jsonl")
    (tmp_path / "notes.txt").write_text("where this comes from")
    assert list(load_dataset_source(str(tmp_path))) == ["train"]
    (tmp_path / "train.jsonl").unlink()
    assert list(load_dataset_source(str(tmp_path))) == ["notes"]


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_a_folder_are_splits(tmp_path, streaming):
    write(tmp_path / "data" / "train.jsonl", ROWS)
    write(tmp_path / "data" / "dev.json", ROWS[1:])
    (tmp_path / "data" / "README.md").write_text("no data")
    found = load_dataset_source(str(tmp_path / "data"), streaming=streaming)
    assert {name: list(rows) for name, rows in found.items()} == {"train": ROWS, "dev": ROWS[1:]}


def test_files_of_one_name_are_one_split(tmp_path):
    write(tmp_path / "data" / "train.json", ROWS[:1])
    write(tmp_path / "data" / "train.jsonl", ROWS[1:])
    assert list(load_dataset_source(str(tmp_path / "data"))["train"]) == ROWS


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("folder", ["copy", "copy/data"])
def test_a_copy_from_the_hub(tmp_path, folder, streaming):
    """Its files have numbers, and often stand in `data/`."""
    for i in range(2):
        write(tmp_path / folder / f"train-0000{i}-of-00002.parquet", ROWS[i : i + 1])
    write(tmp_path / folder / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "copy" / "README.md").write_text("no data")
    found = load_dataset_source(str(tmp_path / "copy"), streaming=streaming)
    assert {name: list(rows) for name, rows in found.items()} == {"train": ROWS, "test": ROWS[:1]}


@pytest.mark.parametrize("streaming", [False, True])
def test_saved_datasets(tmp_path, streaming):
    splits = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}
    splits["train"].save_to_disk(tmp_path / "one")
    DatasetDict(splits).save_to_disk(tmp_path / "several")
    one = load_dataset_source(str(tmp_path / "one"), streaming=streaming)
    several = load_dataset_source(str(tmp_path / "several"), streaming=streaming)
    assert {name: list(rows) for name, rows in one.items()} == {"train": ROWS}
    found = {name: list(rows) for name, rows in several.items()}
    assert found == {"train": ROWS, "test": ROWS[:1]}
    kind = IterableDataset if streaming else Dataset
    assert {type(rows) for rows in several.values()} == {type(one["train"])} == {kind}


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rows.jsonl")
    assert list(load_dataset_source("~/rows.jsonl")["train"]) == ROWS


@pytest.mark.parametrize("name", ["trian.jsonl", "train.json"])
def test_an_absent_file_names_the_nearest(tmp_path, name):
    there = write(tmp_path / "train.jsonl")
    write(tmp_path / "something_else.csv")
    with pytest.raises(ValueError) as caught:
        load_dataset_source(str(tmp_path / name))
    expected = f"--dataset_name {tmp_path / name}: there is no such file. The nearest is {there}."
    assert str(caught.value) == expected


def test_an_absent_relative_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl")
    for name in ("trainn.jsonl", "./trainn.jsonl"):
        with pytest.raises(ValueError, match=r"no such file\. The nearest is train\.jsonl\.$"):
            load_dataset_source(name)
    with pytest.raises(ValueError, match=r"nowhere/x\.csv: there is no such file\.$"):
        load_dataset_source("nowhere/x.csv")


def test_an_absent_folder_names_the_nearest(tmp_path):
    there = tmp_path / "data"
    write(there / "train.jsonl")
    for name in ("dta/train.jsonl", "dta/deeper/train.jsonl", "dta"):
        with pytest.raises(ValueError) as caught:
            load_dataset_source(str(tmp_path / name))
        assert str(caught.value).endswith(f"there is no such file. The nearest is {there}.")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.jsonl", '{"prompt":\n', "line 1 of rows.jsonl is not valid JSON: Expecting value"),
        ("rows.txt", "", "it holds no rows"),
        ("rows.arrow", "text", "File is too small: 4"),
        ("rows.json", "", "it holds no rows"),
        ("rows.csv", "", "it holds no rows"),
        ("rows.parquet", "text", "smaller than the minimum file footer"),
    ],
)
def test_broken_files(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as caught:
        load_dataset_source(str(tmp_path / name))
    text = str(caught.value)
    assert text.startswith(f"--dataset_name {tmp_path / name}: cannot be read (")
    assert reason in text
    assert "\n" not in text


def test_unknown_kinds_of_files(tmp_path):
    (tmp_path / "rows.yaml").write_text("a: 1")
    (tmp_path / "rows").write_text("a")
    with pytest.raises(ValueError, match=r"kind '\.yaml' cannot be read; use one of \.json, "):
        load_dataset_source(str(tmp_path / "rows.yaml"))
    with pytest.raises(ValueError, match="kind 'unknown' cannot be read"):
        load_dataset_source(str(tmp_path / "rows"))


def test_folders_without_data_or_of_several_kinds(tmp_path):
    with pytest.raises(ValueError, match="the folder holds no data file"):
        load_dataset_source(str(tmp_path))
    write(tmp_path / "a.csv")
    write(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match=r"files of several kinds \(\.csv, \.jsonl\)"):
        load_dataset_source(str(tmp_path))


def test_what_is_neither_local_nor_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "additions" / "train.jsonl")
    with pytest.raises(ValueError) as caught:
        load_dataset_source("addition")
    text = str(caught.value)
    assert text.startswith("--dataset_name addition: neither a local path nor a dataset that can")
    assert text.endswith("The nearest is additions.")
    assert "\n" not in text
