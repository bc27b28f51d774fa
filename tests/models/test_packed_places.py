"""Where the tokens of a packed row lie, and which others they see."""

from trl.models.packed_places import Packing, Window


def test_tails_of_similar_length_are_computed_together():
    """Lengths between two powers of two, so that less than half of a bucket is repeats."""
    packing = Packing.of([(4, [1, 2, 3, 7, 0, 4]), (2, [5, 8, 15])], "cpu")
    buckets = packing.places().buckets
    lengths = [sorted(bucket.exists.sum(1).tolist()) for bucket in buckets]
    assert sorted(lengths) == [[1], [2, 3], [4, 5, 7], [8, 15]]
    for bucket in buckets:
        index, exists, own = bucket.index, bucket.exists, []
        assert index.shape == exists.shape == (len(index), int(exists.sum(1).max()))
        assert exists.float().mean() > 0.5
        for places, real in zip(index.tolist(), exists.sum(1).tolist(), strict=True):
            run = list(range(places[0], places[0] + real))
            assert places == run + [run[-1]] * (len(places) - real)
            own += run
        assert bucket.places.tolist() == index.flatten()[bucket.cells].tolist() == own


def test_keys_seen_by_all_tails_are_read_once():
    """Of the prefix; only those that some tokens of a tail see and others do not are copied."""
    places = Packing.of([(100, [5, 6, 7, 8, 8, 9])], "cpu").places(Window(64))
    tails = [bucket for bucket in places.buckets if bucket.index[0, 0] >= 100]
    assert [len(bucket.index) for bucket in tails] == [3, 3]
    for bucket in tails:
        own, fading, everything = bucket.sights
        width = bucket.index.shape[1]
        assert own.index.shape == fading.index.shape == (3, width)
        assert everything.index.tolist() == [list(range(100 - 63 + width, 100))]


def test_a_window_that_no_row_outgrows_changes_nothing():
    packing = Packing.of([(5, [3, 4]), (2, [9])], "cpu")
    assert packing.places(Window(11)) is packing.places()
    assert packing.places(Window(10)) is packing.places(Window(10)) is not packing.places()
