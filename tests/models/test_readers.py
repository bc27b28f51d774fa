"""Errors of readers; what they read is tested with the scorer and the value model."""

import pytest
import torch

from trl.models.packed_layout import plain_layout
from trl.models.readers import Hidden, first_reading
from trl.models.unwrap import Capture
from trl.types import Rows


def test_missing_states_logits_and_results_are_errors():
    layout = plain_layout(Rows.of([([1], [2])]), 0, torch.device("cpu"))
    hidden = Hidden(layout, Capture())
    with pytest.raises(RuntimeError, match="returned no hidden states"):
        hidden.at(torch.tensor([0]))
    with pytest.raises(RuntimeError, match="returned no logits"):
        hidden.last_logits()
    with pytest.raises(RuntimeError, match="None as its first result"):
        first_reading((None, torch.ones(1)))
