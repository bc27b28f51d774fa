import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.ops.packing import best_fit

lengths_and_size = st.integers(1, 50).flatmap(
    lambda size: st.tuples(st.lists(st.integers(0, size), max_size=60), st.just(size))
)


def slow_best_fit(lengths, size):
    packs, rooms = [], []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [p for p, room in enumerate(rooms) if room >= lengths[document] > 0]
        if lengths[document] == 0:
            continue
        if not fitting:
            packs.append([])
            rooms.append(size)
            fitting = [len(packs) - 1]
        best = min(fitting, key=lambda p: rooms[p])
        packs[best].append(document)
        rooms[best] -= lengths[document]
    return packs


@settings(deadline=None)
@given(lengths_and_size)
def test_every_document_is_packed_once_and_as_densely_as_by_search(case):
    lengths, size = case
    packs = best_fit(lengths, size)
    assert sorted(d for pack in packs for d in pack) == [i for i, n in enumerate(lengths) if n]
    assert all(sum(lengths[d] for d in pack) <= size for pack in packs)
    assert len(packs) == len(slow_best_fit(lengths, size))


def test_ten_thousand_gamma_lengths_fill_their_packs():
    lengths = np.minimum(np.random.default_rng(0).gamma(2, 300, 10_000).astype(int) + 1, 2_000)
    packs = best_fit(lengths, 2_000)
    assert lengths.sum() / (2_000 * len(packs)) >= 0.98
    assert packs == best_fit(lengths, 2_000)


def test_a_document_longer_than_a_pack_is_refused():
    with pytest.raises(ValueError, match="Document 1 has 9 tokens, but a pack holds 4"):
        best_fit([3, 9], 4)
