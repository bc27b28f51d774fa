"""Where the tokens of a packed row lie, and which others they see."""

from trl.models.packed_row import Packing, Window


def test_tails_of_similar_length_are_computed_together():
    """Lengths between two powers of two, so that less than half of a bucket is repeats."""
    packing = Packing.of([(4, [1, 2, 3, 7, 0, 4]), (2, [5, 8, 15])], "cpu")
    calls = [call for call in packing.attention_calls() if call.real_indices is not None]
    lengths = [sorted(call.is_real.sum(1).tolist()) for call in calls]
    assert sorted(lengths) == [[1], [2, 3], [4, 5, 7], [8, 15]]
    for call in calls:
        index, exists, own = call.queries, call.is_real, []
        assert index.shape == exists.shape == (len(index), int(exists.sum(1).max()))
        assert exists.float().mean() > 0.5
        for places, real in zip(index.tolist(), exists.sum(1).tolist(), strict=True):
            run = list(range(places[0], places[0] + real))
            assert places == run + [run[-1]] * (len(places) - real)
            own += run
        entries = index.flatten()[call.real_entries]
        assert call.real_indices.tolist() == entries.tolist() == own


def test_keys_seen_by_all_tails_are_read_once():
    """Of the prefix; only those that some tokens of a tail see and others do not are copied."""
    calls = Packing.of([(100, [5, 6, 7, 8, 8, 9])], "cpu").attention_calls(Window(64))
    tails = [call for call in calls if call.queries.min() >= 100]
    assert [call.queries.shape[0] for call in tails] == 2 * [3, 3, 1]
    for own, fading, everything in (tails[:3], tails[3:]):
        width = own.queries.shape[1]
        assert own.keys.shape == fading.keys.shape == (3, width)
        assert everything.queries.tolist() == [own.real_indices.tolist()]
        assert everything.keys.tolist() == [list(range(100 - 63 + width, 100))]


def test_a_window_that_no_row_outgrows_changes_nothing():
    packing = Packing.of([(5, [3, 4]), (2, [9])], "cpu")
    assert packing.attention_calls(Window(11)) is packing.attention_calls()
    assert (
        packing.attention_calls(Window(10))
        is packing.attention_calls(Window(10))
        is not packing.attention_calls()
    )
