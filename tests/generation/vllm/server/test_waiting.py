"""Waits that end."""

import pytest

from trl.generation.vllm.server.waiting import Deadline, in_background


def test_deadlines():
    deadline = Deadline(30.0)
    assert not deadline.has_passed and deadline.left == pytest.approx(30.0, abs=10.0)
    assert Deadline(0.0).has_passed and Deadline(-1.0).left == 0.0


def test_errors_of_the_background_are_kept():
    assert in_background(lambda: 3).result(5) == 3
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(5)
