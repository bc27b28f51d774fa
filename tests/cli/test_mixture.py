"""Mixing several datasets into one."""

import json

import datasets
import pytest
import yaml
from datasets import Dataset, DatasetDict, IterableDatasetDict
from tiny import tiny_tokenizer
from workspace import ROOT

from trl.cli.mixture import DatasetConfig, DatasetMixtureConfig, get_dataset
from trl.data.encode import TextEncoder
from trl.data.prepare import prepare_supervised
from trl.data.supervised import SupervisedOptions


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def entry(folder, letter, count, **fields):
    """A dataset of `count` rows a0, a1, ..."""
    path = folder / f"{letter}.jsonl"
    rows = [{"prompt": f"{letter}{i}", letter: i} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": "json", "data_files": str(path), "columns": ["prompt"]} | fields


def names(letter, count):
    return [f"{letter}{i}" for i in range(count)]


def test_numbers_that_yaml_reads_as_text(tmp_path):
    fields = yaml.safe_load("{limit: 1e3, weight: 1e-1}")
    assert fields == {"limit": "1e3", "weight": "1e-1"}
    made = DatasetMixtureConfig([entry(tmp_path, "a", 2, **fields)]).datasets[0]
    assert (made.limit, made.weight) == (1000, 0.1)
    with pytest.raises(ValueError, match=r"datasets\[0\]: weight: 'some' is not a number"):
        DatasetMixtureConfig([entry(tmp_path, "a", 2, weight="some")])


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_are_concatenated_in_order(tmp_path, streaming):
    entries = [entry(tmp_path, "a", 3), entry(tmp_path, "b", 2)]
    found = get_dataset(DatasetMixtureConfig(entries, streaming=streaming))
    assert type(found) is (IterableDatasetDict if streaming else DatasetDict)
    assert list(found) == ["train"]
    assert [row["prompt"] for row in found["train"]] == names("a", 3) + names("b", 2)
    assert all(set(row) == {"prompt"} for row in found["train"])


def test_without_columns_all_are_kept(tmp_path):
    found = get_dataset(DatasetMixtureConfig([entry(tmp_path, "a", 2, columns=None)]))
    assert list(found["train"]) == [{"prompt": "a0", "a": 0}, {"prompt": "a1", "a": 1}]


@pytest.mark.parametrize(
    ("sizes", "fractions", "taken"),
    [
        ((6, 6), (0.5, 0.5), (6, 6)),
        ((6, 6), (2, 1), (6, 3)),  # 6 / (2/3) = 9 rows in all
        ((8, 1), (0.75, 0.25), (3, 1)),  # b allows 4 rows in all
        ((4, 9), (1, 3), (3, 9)),  # b allows 12, a 16
        ((4, 3), (0, 1), (0, 3)),
    ],
)
def test_fractions_take_what_the_scarcest_allows(tmp_path, sizes, fractions, taken):
    pairs = zip("ab", sizes, fractions, strict=True)
    entries = [entry(tmp_path, letter, size, fraction=f) for letter, size, f in pairs]
    found = get_dataset(DatasetMixtureConfig(entries))["train"]["prompt"]
    assert list(found) == names("a", taken[0]) + names("b", taken[1])


def test_weights_limits_and_names(tmp_path):
    """A limit comes first, then the weight, and each row says where it is from."""
    entries = [entry(tmp_path, "a", 5, limit=4, weight=1.5, source="A"), entry(tmp_path, "b", 2)]
    rows = list(get_dataset(DatasetMixtureConfig(entries))["train"])
    found = [row["prompt"] for row in rows if row["dataset_source"] == "A"]
    assert found[:4] == names("a", 4) and len(found) == 6 and len(set(found[4:])) == 2
    assert [row["prompt"] for row in rows if row["dataset_source"] == "json"] == names("b", 2)
    again = list(get_dataset(DatasetMixtureConfig(entries))["train"])
    assert again == rows


def test_limits_and_names_of_streams(tmp_path):
    entries = [entry(tmp_path, "a", 5, limit=2, source="A"), entry(tmp_path, "b", 1, source="B")]
    rows = list(get_dataset(DatasetMixtureConfig(entries, streaming=True))["train"])
    assert [(r["prompt"], r["dataset_source"]) for r in rows] == [
        ("a0", "A"),
        ("a1", "A"),
        ("b0", "B"),
    ]


def test_test_split(tmp_path):
    entries = [entry(tmp_path, "a", 6), entry(tmp_path, "b", 4)]
    found = get_dataset(DatasetMixtureConfig(entries, test_split_size=0.3))
    train, test = list(found["train"]["prompt"]), list(found["test"]["prompt"])
    assert list(found) == ["train", "test"]
    assert (len(train), len(test)) == (7, 3)
    assert sorted(train + test) == names("a", 6) + names("b", 4)


def test_all_processes_hold_out_the_same_rows(tmp_path):
    config = DatasetMixtureConfig([entry(tmp_path, "a", 40)], test_split_size=0.5)
    first, second = (list(get_dataset(config)["test"]["prompt"]) for _ in range(2))
    assert first == second
    assert set(first) != set(names("a", 40)[20:]), "chosen at random"


def test_entries_may_be_made_already(tmp_path):
    made = DatasetConfig(**entry(tmp_path, "a", 2))
    config = DatasetMixtureConfig([made, entry(tmp_path, "b", 1)])
    assert config.datasets[0] is made
    assert config.datasets[1].data_files == str(tmp_path / "b.jsonl")
    assert config.datasets[1].split == "train"


@pytest.mark.parametrize(
    ("entries", "others", "words"),
    [
        (
            [{"path": "json", "frction": 1}],
            {},
            r"datasets\[0\]: unknown field 'frction'; .*columns",
        ),
        ([{"path": "json"}, {"split": "test"}], {}, r"datasets\[1\]: no path; fields are path,"),
        ([{"path": "a", "fraction": 1.0}, {"path": "b"}], {}, "to all of them or to none"),
        ([{"path": "a", "fraction": 1.0}], {"streaming": True}, "streaming must be false"),
        ([{"path": "a"}], {"streaming": True, "test_split_size": 0.1}, "streaming must be false"),
        ([{"path": "a", "weight": 2}], {"streaming": True}, "streaming must be false"),
        ([{"path": "a", "weight": 0}], {}, r"datasets\[0\]: weight must be above 0, not 0"),
        ([{"path": "a", "limit": 0}], {}, r"datasets\[0\]: limit must be above 0, not 0"),
        ([{"path": "a", "fraction": 0.0}], {}, "nor all of them 0"),
        ([{"path": "a", "fraction": 2}, {"path": "b", "fraction": -1}], {}, "not be negative"),
    ],
)
def test_bad_mixtures(entries, others, words):
    with pytest.raises(ValueError, match=words):
        DatasetMixtureConfig(entries, **others)


def test_an_empty_mixture():
    with pytest.raises(ValueError, match="datasets is empty"):
        get_dataset(DatasetMixtureConfig())


@pytest.mark.parametrize("streaming", [False, True])
def test_local_files_and_saved_datasets_are_paths(tmp_path, streaming):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.tsv").write_text("text\tn\nthree\t3\n")
    Dataset.from_dict({"text": ["four"]}).save_to_disk(tmp_path / "c")
    entries = [{"path": str(tmp_path / name)} for name in ("a.txt", "c")]
    entries.append({"path": str(tmp_path / "b.tsv"), "columns": ["text"]})
    found = get_dataset(DatasetMixtureConfig(entries, streaming=streaming))
    assert [row["text"] for row in found["train"]] == ["one", "two", "four", "three"]
    with pytest.raises(ValueError, match=r"datasets: split 'test': .*a.txt has the splits train"):
        get_dataset(DatasetMixtureConfig([entries[0] | {"split": "test"}]))


INSTRUCTIONS = [
    {"instruction": "Add.", "input": "1+2", "output": "3"},
    {"instruction": "Say {hi}.", "input": "", "output": " hi\n"},
    {"instruction": "Stop.", "input": None, "output": "."},
]
QUESTION = "{instruction}\n\n{input}"


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("streaming", [False, True])
def test_new_columns_are_made_of_others(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, INSTRUCTIONS)))
    texts = {"prompt": QUESTION, "completion": "{output}"}
    messages = [turn("user", QUESTION), turn("assistant", "{output}")]
    questions, answers = ["Add.\n\n1+2", "Say {hi}.", "Stop."], ["3", "hi", "."]
    for columns in (texts, {"messages": messages}):
        one = {"path": str(path), "columns": columns}
        rows = list(get_dataset(DatasetMixtureConfig([one], streaming=streaming))["train"])
        pairs = zip(questions, answers, strict=True)
        if columns is texts:
            expected = [{"prompt": q, "completion": a} for q, a in pairs]
        else:
            expected = [{"messages": [turn("user", q), turn("assistant", a)]} for q, a in pairs]
        assert rows == expected


def test_the_recipe_for_instructions_gives_conversations(tmp_path):
    config = yaml.safe_load((ROOT / "examples/cli_configs/sft_instructions.yaml").read_text())
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, INSTRUCTIONS)))
    one = config["datasets"][0] | {"path": str(tmp_path / "a.jsonl")}
    data = get_dataset(DatasetMixtureConfig([one]))["train"]
    encoder = TextEncoder(tiny_tokenizer())
    ids = prepare_supervised(data, encoder, SupervisedOptions())["input_ids"]
    assert encoder.tokenizer.decode(ids[0]) == "<user>Add.\n\n1+2<end><assistant>3<end>"


@pytest.mark.parametrize("template", ["{instructions}", "{}", "{instruction"])
def test_a_column_that_does_not_exist_is_named(tmp_path, template):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, INSTRUCTIONS)))
    one = {"path": str(tmp_path / "a.jsonl"), "columns": {"text": template}}
    with pytest.raises(ValueError, match="the dataset has instruction, input, output"):
        get_dataset(DatasetMixtureConfig([one]))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_file_that_cannot_be_read_is_named(tmp_path, by_name):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2},\n')
    one = {"path": str(path)} if by_name else {"path": "json", "data_files": {"train": str(path)}}
    with pytest.raises(ValueError, match=r"datasets: .*line 2 of a.jsonl ends with a comma"):
        get_dataset(DatasetMixtureConfig([one]))
    path.write_bytes(b'{"a": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"datasets: .*line 1 of a.jsonl is not UTF-8"):
        get_dataset(DatasetMixtureConfig([one]))


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (
            "a.jsonl",
            r"\[0\]: 'a.jsonl' must be a mapping, such as {path: DATA.jsonl}; fields",
        ),
        (
            {"path": "a.jsonl", "columns": 3},
            r"\[0\]: columns must be a list of names, or a mapping",
        ),
    ],
)
def test_entries_that_are_no_datasets(entry, error):
    with pytest.raises(ValueError, match=error):
        DatasetMixtureConfig(datasets=[entry])


def test_the_file_nearest_to_one_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="rws.jsonl: there is no such file. The nearest is rows."):
        get_dataset(DatasetMixtureConfig(datasets=[{"path": "rws.jsonl"}]))
