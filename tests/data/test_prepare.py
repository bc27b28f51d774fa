import gc

import pytest
from bpe import bpe_tokenizer
from datasets import Dataset, load_from_disk
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl.data.cutting import DocumentLimits, cut_documents
from trl.data.encode import TextEncoder
from trl.data.lazy import lazy_documents
from trl.data.prepare import default_processes, fingerprint_of, id_lists, prepare_supervised
from trl.data.supervised import SupervisedOptions

ENCODER = TextEncoder(tiny_tokenizer())


def test_prepared_columns_and_labels():
    rows = Dataset.from_dict({"prompt": ["ab", "a"], "completion": ["cd", "b"]})
    table = prepare_supervised(rows, ENCODER, SupervisedOptions())
    assert table.column_names == ["input_ids", "labels", "source", "merged", "origin"]
    ids = ENCODER.ids(["abcd<eos>"])[0]
    expected = {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}
    assert table[0] == expected | {"source": 0, "merged": 0, "origin": ""}
    assert table[:2]["source"] == [0, 1] and len(table.select([1])) == 1


def test_equal_results_for_any_number_of_processes(tmp_path):
    rows = Dataset.from_dict({"text": [f"row {i} of the harbour" for i in range(2_500)]})
    encoder = TextEncoder(bpe_tokenizer())
    one, two = (prepare_supervised(rows, encoder, SupervisedOptions(), n) for n in (1, 2))
    assert one[:] == two[:]
    assert one["source"][:] == list(range(2_500))


def test_equal_preparation_is_read_from_the_cache(tmp_path):
    Dataset.from_dict({"text": ["abc", "de"]}).save_to_disk(tmp_path / "rows")
    calls = tmp_path / "calls"

    def shout(row):
        calls.write_text(calls.read_text() + "." if calls.exists() else ".")
        return row["text"] * 2

    def prepare(encoder=ENCODER, **options):
        rows = Dataset.load_from_disk(tmp_path / "rows")
        chosen = SupervisedOptions(formatting_func=shout, **options)
        return prepare_supervised(rows, encoder, chosen)._fingerprint, len(calls.read_text())

    first, made = prepare()
    assert prepare() == (first, made)
    other, _ = prepare(encoder=TextEncoder(bpe_tokenizer()))
    assert len({first, other, prepare(completion_only_loss=False)[0]}) == 3


def test_streams_are_encoded_while_they_are_read():
    texts = ["ab", "cd"]
    stream = Dataset.from_dict({"text": texts}).to_iterable_dataset()
    rows = list(prepare_supervised(stream, ENCODER, SupervisedOptions()))
    ids = [ENCODER.ids([text + "<eos>"])[0] for text in texts]
    assert [row["input_ids"] for row in rows] == [row["labels"] for row in rows] == ids
    assert [row["source"] for row in rows] == [0, 1]


def test_a_stream_of_token_ids_has_their_names_before_and_after():
    stream = Dataset.from_dict({"input_ids": [[7, 8, 9]]}).to_iterable_dataset()
    (row,) = prepare_supervised(stream, ENCODER, SupervisedOptions())
    assert row["input_ids"] == [7, 8, 9] and row["labels"] == [7, 8, 9]


def test_errors_name_the_rows():
    rows = Dataset.from_dict({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]})
    with pytest.raises(ValueError, match="Row 1 of the dataset: labels must be as long as"):
        prepare_supervised(rows, ENCODER, SupervisedOptions())
    with pytest.raises(ValueError, match="The dataset has no rows"):
        prepare_supervised(rows.select([]), ENCODER, SupervisedOptions())


def test_nothing_looks_for_garbage_while_rows_are_encoded():
    seen = []

    def text(row):
        seen.append(gc.isenabled())
        return row["text"]

    options = SupervisedOptions(formatting_func=text)
    prepare_supervised(Dataset.from_dict({"text": ["ab", "cd"]}), ENCODER, options)
    assert seen == [False, False] and gc.isenabled()
    with pytest.raises(ValueError, match="Row 0 of the dataset"):
        prepare_supervised(Dataset.from_dict({"other": ["ab"]}), ENCODER, options)
    assert gc.isenabled()


class Drawing:
    """Makes texts of rows, with an object that nothing can copy or write down."""

    def __init__(self):
        self.drawn = (word for word in "ab")

    def text(self, row):
        return row["q"] + next(self.drawn)


def test_a_formatting_function_need_not_be_fit_for_a_cache():
    rows = Dataset.from_dict({"q": ["a", "b"]})
    options = SupervisedOptions(formatting_func=Drawing().text)
    found = prepare_supervised(rows, ENCODER, options)["input_ids"][:]
    assert found == ENCODER.ids(["aa<eos>", "bb<eos>"])


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_transform_of_the_dataset_makes_the_rows(is_lazy):
    rows = Dataset.from_dict({"raw": ["ab", "c"]})
    rows = rows.with_transform(lambda batch: {"text": [text * 2 for text in batch["raw"]]})
    if is_lazy:
        ids = lazy_documents(rows, ENCODER, SupervisedOptions(), DocumentLimits())[:2]["input_ids"]
    else:
        ids = prepare_supervised(rows, ENCODER, SupervisedOptions())["input_ids"][:]
    assert ids == ENCODER.ids(["abab<eos>", "cc<eos>"])


def test_few_rows_start_no_processes():
    assert default_processes(2_000) is None


def test_a_fingerprint_tells_datasets_apart_and_stays():
    dataset = Dataset.from_dict({"ids": [1, 2, 3]})
    same = Dataset(dataset.data, fingerprint=fingerprint_of(dataset))
    assert fingerprint_of(same) == fingerprint_of(dataset)
    others = [dataset.select([1, 0]), dataset.rename_column("ids", "x"), dataset.map(lambda x: x)]
    assert len({fingerprint_of(dataset), *map(fingerprint_of, others)}) == 4


def test_a_prepared_dataset_is_not_encoded_again(tmp_path):
    rows = Dataset.from_dict({"text": ["ab", "cde"], "dataset_source": ["x", "y"]})
    table = prepare_supervised(rows, ENCODER, SupervisedOptions())
    table.save_to_disk(tmp_path)
    for dataset in (table, table.shuffle(seed=1), load_from_disk(tmp_path)):
        assert prepare_supervised(dataset, ENCODER, SupervisedOptions()) is dataset
    shorter = table.map(
        lambda row: {"input_ids": row["input_ids"][:2], "labels": row["labels"][:2]}
    )
    found = cut_documents(prepare_supervised(shorter, ENCODER, SupervisedOptions())).dataset
    assert found["input_ids"][:] == [ids[:2] for ids in table["input_ids"]]
    assert found["origin"][:] == ["x", "y"]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5))
def test_lists_of_ids_are_written_down(rows):
    assert id_lists(rows).to_pylist() == rows
