from functools import partial
from itertools import chain, pairwise

from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl.data.cutting import DocumentLimits, cut_documents
from trl.data.encode import TextEncoder
from trl.data.examples import num_tokens
from trl.data.prepare import prepare_supervised
from trl.data.streams import MicroBatchStream, PreparedStream
from trl.data.supervised import SupervisedOptions

lengths = st.lists(st.integers(2, 20), min_size=1, max_size=60)


def stream_of(rows, max_length=None):
    """A stream of prepared rows: all their tokens are in the loss."""
    rows = [
        {"input_ids": [7] * n, "labels": [7] * n, "source": i, "merged": 0, "origin": ""}
        for i, n in enumerate(rows)
    ]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    limits = DocumentLimits(max_length=max_length)
    return PreparedStream(stream, partial(cut_documents, limits=limits))


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 24]), st.booleans())
def test_every_document_of_a_stream_is_trained_on_by_one_rank(sizes, rows, ranks, most, packs):
    seen, counts = [], set()
    for rank in range(ranks):
        limits = rows, most, 20 if packs else None
        batches = list(MicroBatchStream(stream_of(sizes), limits, (rank, ranks)))
        counts.add(len(batches))
        for batch in batches:
            assert packs or len(batch) <= rows
            taken = sum(sizes[row["source"]] for row in batch)
            assert most is None or taken <= most or len(batch) == 1
        seen += [row["source"] for row in chain(*batches) if "is_filler" not in row]
    assert sorted(seen) == list(range(len(sizes))) and len(counts) == 1


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 4))
def test_a_micro_batch_of_a_stream_is_full_unless_it_is_the_last(sizes, rows):
    """Wherever reading stops for a while, what is read next may still go into it."""
    batches = list(MicroBatchStream(stream_of(sizes), (rows, 24, None)))
    for batch, later in pairwise(batches):
        taken = sum(sizes[row["source"]] for row in batch)
        assert len(batch) == rows or taken + sizes[later[0]["source"]] > 24


def test_a_stream_is_read_as_it_is_needed():
    read = []

    def rows():
        for i in range(10_000):
            read.append(i)
            yield {"input_ids": [7, 7], "labels": [7, 7], "source": i, "merged": 0, "origin": ""}

    stream = PreparedStream(IterableDataset.from_generator(rows), cut_documents)
    next(iter(MicroBatchStream(stream, (4, None, None))))
    assert max(read) < 100


def test_rows_that_are_left_out_or_cut_are_named_and_counted(caplog):
    stream = MicroBatchStream(stream_of([3, 1, 4, 1, 5], max_length=3))
    assert [num_tokens(row) for row in chain(*stream)] == [3, 3, 3]
    left_out, cut, counts = sorted(caplog.messages, key=lambda text: "Rows of" in text)
    assert {left_out, cut} == {
        "Row 1 is left out, with nothing left to train on; further ones are only counted.",
        "Row 2 is over a length limit; further ones are only counted.",
    }
    assert counts == (
        "Rows of the stream: 2 over a length limit; 2 left out, with nothing left to train on."
    )


def test_a_stream_has_the_columns_of_a_prepared_dataset():
    encoder = TextEncoder(tiny_tokenizer())
    rows = Dataset.from_dict({"text": ["ab", "cde"]})
    whole = prepare_supervised(rows, encoder, SupervisedOptions())
    read = prepare_supervised(rows.to_iterable_dataset(), encoder, SupervisedOptions())
    stream = PreparedStream(read, cut_documents)
    assert stream.column_names == whole.column_names
    assert list(stream) == list(whole) == list(stream)


def test_a_shuffled_stream_has_another_order_in_each_epoch():
    batches = MicroBatchStream(stream_of(range(2, 30)).shuffled(seed=0, buffer_size=100))
    orders = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        orders.append([row["source"] for row in chain(*batches)])
    assert orders[0] == orders[2] != orders[1]
