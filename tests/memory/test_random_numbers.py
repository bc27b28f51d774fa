"""What is drawn inside leaves no trace outside."""

import random

import numpy as np
import torch

from trl.memory.random_numbers import preserve_rng_state


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_streams_go_on_as_if_nothing_was_drawn():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    found = [draw()]
    with preserve_rng_state():
        assert draw() == expected[1]
    found.append(draw())
    assert found == expected
