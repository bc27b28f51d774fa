import copy
import pickle

from datasets import Dataset, load_from_disk
from tiny import tiny_tokenizer

from trl.data.cutting import DocumentLimits, cut_documents
from trl.data.encode import TextEncoder
from trl.data.examples import RowReader, make_group, token_counts
from trl.data.lazy import is_lazy, lazy_documents, raw_rows
from trl.data.prepare import prepare_supervised
from trl.data.supervised import SupervisedOptions

ENCODER = TextEncoder(tiny_tokenizer())
ROWS = Dataset.from_dict({"prompt": ["ab", "a" * 9, "c", "d"], "completion": list("wxyz")})
LIMITS = DocumentLimits(max_length=5)


def lazy(rows=ROWS):
    return lazy_documents(rows, ENCODER, SupervisedOptions(), LIMITS)


def test_lazy_documents_are_those_of_a_prepared_dataset(caplog):
    prepared = prepare_supervised(ROWS, ENCODER, SupervisedOptions())
    expected = cut_documents(prepared, LIMITS).dataset
    reader = RowReader(lazy())
    assert reader.__getitems__([0, 1, 2, 3]) == list(expected)
    assert expected["source"][:] == [0, 2, 3]
    assert [text.split("; further")[0] for text in caplog.messages[-2:]] == [
        "Row 1 is over a length limit",
        "Row 1 is left out, with nothing left to train on",
    ]
    # A micro-batch always has a document; this one is not trained on.
    (untrained,) = reader.__getitems__([1])
    assert make_group(untrained).is_filler and len(reader) == 4
    (filler,) = reader.__getitems__([~2])
    assert make_group(filler).is_filler and filler["source"] == 2


def test_a_lazy_dataset_is_one_of_datasets(tmp_path):
    found = lazy()
    prepared = prepare_supervised(ROWS, ENCODER, SupervisedOptions())
    assert found.column_names == prepared.column_names and found.features == prepared.features
    assert found[0] == prepared[0] and found[2:] == prepared[2:]
    assert found.select([3, 0])[:] == prepared.select([3, 0])[:]
    assert copy.deepcopy(found)[0] == pickle.loads(pickle.dumps(found))[0] == prepared[0]
    longer = found.map(lambda row: {"n": len(row["input_ids"])})
    assert longer[0] == prepared[0] | {"n": 4}
    found.map(dict).with_format(None).save_to_disk(tmp_path)
    assert load_from_disk(tmp_path)[3] == prepared[3]


def test_what_a_lazy_dataset_knows_before_it_is_read():
    found = lazy()
    assert token_counts(found).tolist() == [0] * 4
    assert is_lazy(found) and raw_rows(found) is ROWS
    assert not is_lazy(ROWS) and raw_rows(ROWS) is ROWS


def test_a_filler_is_one_example_although_its_row_becomes_several():
    limits = DocumentLimits(max_length=5, long_rows="split")
    data = Dataset.from_dict({"text": ["abcdefghijklmnop"]})
    reader = RowReader(lazy_documents(data, ENCODER, SupervisedOptions(), limits))
    pieces = reader.__getitems__([0])
    assert len(pieces) > 1 and not any(make_group(piece).is_filler for piece in pieces)
    (filler,) = reader.__getitems__([~0])
    assert make_group(filler).is_filler
