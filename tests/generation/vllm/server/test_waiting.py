"""Waiting that ends."""

import time

import pytest

from trl.generation.vllm.server.waiting import in_background, looks


def test_looks_end_and_there_is_one_at_least():
    found = list(looks(0.05, 0.02))
    assert found and found[0] == 0.05 and found == sorted(found, reverse=True)
    assert list(looks(0.0, 60.0)) == list(looks(-1.0, 60.0)) == [0.0]


def test_pauses_double_up_to_a_bound_and_none_is_longer_than_what_is_left(monkeypatch):
    pauses, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda t: (pauses.append(t), now.__setitem__(0, now[0] + t)))
    list(looks(12.0, 1.0, longest=4.0))
    assert pauses == [1.0, 2.0, 4.0, 4.0, 1.0]


def test_errors_of_the_background_are_kept():
    assert in_background(lambda: 3).result(60) == 3
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(60)
