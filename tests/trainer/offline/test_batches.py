from datasets import IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.data.packing import MicroBatchSampler
from trl.data.rows import Document
from trl.trainer.offline.batches import ItemStream, RankBatches, StreamBatches, share_of_rank

lengths = st.lists(st.integers(2, 20), min_size=1, max_size=60)


def documents_of(sizes):
    """A stream of documents, numbered by their source."""
    rows = [{"source": i, "size": size} for i, size in enumerate(sizes)]

    def unpack(row):
        filler = Document.filler(row["source"])
        return [Document(ids=filler.ids, trained=filler.trained, source=row["source"])]

    return ItemStream(
        IterableDataset.from_generator(lambda: iter(rows)),
        unpack,
        lambda document: sizes[document.source],
    )


def test_what_is_left_over_goes_to_the_first_ranks():
    batches = [[0, 1], [2, 3], [4, 5], [6]]
    shares = [list(share_of_rank(batches, rank, 3)) for rank in range(3)]
    assert shares == [[[0, 1], [6]], [[2, 3], [~6]], [[4, 5], [~6]]]


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 24]), st.booleans())
def test_every_document_is_trained_on_by_one_rank(sizes, rows, ranks, most, packs):
    pack_size = 20 if packs else None
    for epoch in range(2):
        seen, counts = [], set()
        for rank in range(ranks):
            sampler = MicroBatchSampler(sizes, rows, most, pack_size, seed=3)
            order = RankBatches(sampler, rank, ranks)
            order.set_epoch(epoch)
            batches = list(order)
            counts.add(len(batches))
            assert len(batches) == len(order)
            seen += [i for batch in batches for i in batch if i >= 0]
        assert sorted(seen) == list(range(len(sizes))) and len(counts) == 1


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 24]), st.booleans())
def test_every_document_of_a_stream_is_trained_on_by_one_rank(sizes, rows, ranks, most, packs):
    seen, counts = [], set()
    for rank in range(ranks):
        stream = StreamBatches(
            documents_of(sizes), rows, most, 20 if packs else None, (rank, ranks)
        )
        batches = list(stream)
        counts.add(len(batches))
        for batch in batches:
            assert packs or len(batch) <= rows
            taken = sum(sizes[d.source] for d in batch)
            assert most is None or taken <= most or len(batch) == 1
        seen += [d.source for batch in batches for d in batch if d.counts]
    assert sorted(seen) == list(range(len(sizes))) and len(counts) == 1


def test_a_stream_is_read_as_it_is_needed():
    read = []

    def rows():
        for i in range(10_000):
            read.append(i)
            yield {"source": i}

    stream = ItemStream(
        IterableDataset.from_generator(rows),
        lambda row: [Document.filler(row["source"])],
        lambda document: 2,
    )
    next(iter(StreamBatches(stream, 4, None, None, (0, 2))))
    assert max(read) < 100


def test_rows_with_nothing_to_train_on_are_named(monkeypatch):
    said = []
    monkeypatch.setattr("trl.trainer.offline.batches.logger.warning", said.append)
    rows = [{"source": i, "merged": i % 2} for i in range(5)]
    stream = ItemStream(IterableDataset.from_generator(lambda: iter(rows)), lambda row: [], len)
    assert list(stream) == []
    first, counts = said
    assert first.startswith("Row 0 of the stream has nothing to train on and is left out; so are")
    assert "left out: 5; with a token" in counts and counts.endswith("trained on: 2.")
