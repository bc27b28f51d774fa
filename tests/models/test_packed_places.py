"""Where the tokens of a packed row lie, and which others they see."""

from trl.models.packed_places import Packing, Window


def test_tails_of_similar_length_are_computed_together():
    """Lengths between two powers of two, so that less than half of a bucket is repeats."""
    packing = Packing.of([(4, [1, 2, 3, 7, 0, 4]), (2, [5, 8, 15])], "cpu")
    parts = [part for part in packing.parts() if part.places is not None]
    lengths = [sorted(part.exists.sum(1).tolist()) for part in parts]
    assert sorted(lengths) == [[1], [2, 3], [4, 5, 7], [8, 15]]
    for part in parts:
        index, exists, own = part.queries, part.exists, []
        assert index.shape == exists.shape == (len(index), int(exists.sum(1).max()))
        assert exists.float().mean() > 0.5
        for places, real in zip(index.tolist(), exists.sum(1).tolist(), strict=True):
            run = list(range(places[0], places[0] + real))
            assert places == run + [run[-1]] * (len(places) - real)
            own += run
        assert part.places.tolist() == index.flatten()[part.cells].tolist() == own


def test_keys_seen_by_all_tails_are_read_once():
    """Of the prefix; only those that some tokens of a tail see and others do not are copied."""
    parts = Packing.of([(100, [5, 6, 7, 8, 8, 9])], "cpu").parts(Window(64))
    tails = [part for part in parts if part.queries.min() >= 100]
    assert [part.queries.shape[0] for part in tails] == 2 * [3, 3, 1]
    for own, fading, everything in (tails[:3], tails[3:]):
        width = own.queries.shape[1]
        assert own.keys.shape == fading.keys.shape == (3, width)
        assert everything.queries.tolist() == [own.places.tolist()]
        assert everything.keys.tolist() == [list(range(100 - 63 + width, 100))]


def test_a_window_that_no_row_outgrows_changes_nothing():
    packing = Packing.of([(5, [3, 4]), (2, [9])], "cpu")
    assert packing.parts(Window(11)) is packing.parts()
    assert packing.parts(Window(10)) is packing.parts(Window(10)) is not packing.parts()
