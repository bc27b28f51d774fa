import math

import pytest
import torch

from trl.ops.mismatch import MODES, RatioBounds, scale_gradient

TRAINER = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -9.0]])
ENGINE = torch.tensor([[-1.6, -1.0, -0.6], [-0.6, -0.3, 5.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
DIFFERENCES = [[0.6, -1.0, 0.1], [-0.9, 0.1]]
BOUNDS = [(None, 1.5), (0.5, None), (0.5, 1.5), (None, 0.7)]


def slow(mode, low, high):
    """Weights of each row, for each of its tokens."""
    rows = []
    for differences in DIFFERENCES:
        if mode.startswith("sequence"):
            differences = [sum(differences)] * len(differences)
        weights = []
        for ratio in map(math.exp, differences):
            above, below = ratio > (high or math.inf), ratio < (low or 0.0)
            bound = high if above else low
            is_mask = mode.endswith("mask")
            weights.append((0.0 if is_mask else bound) if above or below else ratio)
        rows.append(weights)
    return rows


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_by_value(mode, low, high):
    bounds = RatioBounds(mode, low, high)
    ratio = bounds.ratio(TRAINER, ENGINE, MASK)
    weights = bounds.weight(ratio)
    assert weights.shape == ((2, 3) if mode.startswith("token") else (2, 1))
    for row, expected in enumerate(slow(mode, low, high)):
        found = weights.expand(2, 3)[row, : len(expected)]
        assert found.tolist() == pytest.approx(expected, rel=1e-5), row
    changed = (weights != ratio).tolist()
    assert bounds.beyond(ratio).tolist() == changed


@pytest.mark.parametrize("mode", MODES)
def test_nan_is_no_weight_of_zero(mode):
    engine = ENGINE.clone()
    engine[0, 1] = torch.nan
    bounds = RatioBounds(mode, 0.5, 1.5)
    weights = bounds.weight(bounds.ratio(TRAINER, engine, MASK)).expand(2, 3)
    assert weights[0, 1].isnan() and not weights[1].isnan().any()


@pytest.mark.parametrize("mode", MODES)
def test_ratios_cannot_overflow(mode):
    bounds = RatioBounds(mode, None, None)
    ratio = bounds.ratio(TRAINER, ENGINE - 1e4, MASK)
    assert bounds.weight(ratio).isfinite().all() and ratio.max() > 1e8


def test_unknown_modes():
    with pytest.raises(ValueError, match="token_truncate, .*, not 'row_mask'"):
        RatioBounds("row_mask")


def test_only_the_gradient_is_scaled():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    scaled = scale_gradient(values, torch.tensor([0.0, 0.5, 2.0]))
    assert scaled.tolist() == [1.0, 2.0, 3.0]
    scaled.square().sum().backward()
    assert values.grad.tolist() == [0.0, 2.0, 12.0]
