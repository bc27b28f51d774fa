import math

import pytest
import torch
from slow_support import kept_mass

from trl.ops import logit_statistics
from trl.ops.logit_statistics import Support

FILTERS = [
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.2},
    {"top_p": 0.8, "top_k": 4},
    {"top_p": 0.6, "top_k": 5, "min_p": 0.1},
    {"top_p": 1e-6},
    {"top_k": 1000, "min_p": 0.3},
]


def rows(count=40, size=30, seed=0):
    stream = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, size, generator=stream)
    return logits, torch.randint(size, (count,), generator=stream)


def slow(logits, ids, **filters):
    pairs = zip(logits.tolist(), ids.tolist(), strict=True)
    return torch.tensor([math.log(kept_mass(row, token, **filters)) for row, token in pairs])


@pytest.mark.parametrize("filters", FILTERS)
def test_mass_by_enumeration(filters):
    """Half of the tokens lie outside the support, so they are added to it."""
    logits, ids = rows()
    found = Support(**filters).compute(logits, ids)
    torch.testing.assert_close(found, slow(logits, ids, **filters), rtol=1e-5, atol=1e-6)
    assert found.max() <= 0.0 and found.min() < -0.1


def test_min_p_comes_first():
    """0.5, 0.3, 0.2: min-p drops the last, and of what is left 0.6 is reached by one token."""
    logits, ids = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0])
    found = Support(top_p=0.6, min_p=0.5).compute(logits, ids)
    assert found.exp().tolist() == [pytest.approx(0.5)]
    assert Support(top_p=0.6).compute(logits, ids).exp().tolist() == [pytest.approx(0.8)]


def test_equal_tokens():
    """All as likely as the last of top-k stay; top-p takes as many of them as it needs."""
    logits, ids = torch.zeros(1, 8), torch.tensor([5])
    assert Support(top_k=3).compute(logits, ids).tolist() == [0.0]
    assert Support(top_p=0.4).compute(logits, ids).exp().tolist() == [pytest.approx(0.5)]


def test_a_whole_support():
    assert Support().is_whole and Support(1.0, -1, 0.0).is_whole
    assert not any(Support(**filters).is_whole for filters in FILTERS)
    found = Support().compute(*rows())
    assert found.abs().max() == 0.0


def test_blocks_and_precisions(monkeypatch):
    logits, ids = rows()
    whole = Support(top_p=0.7).compute(logits, ids)
    assert Support(top_p=0.7).compute(logits.double(), ids).dtype == torch.float64
    assert Support(top_p=0.7).compute(logits.bfloat16(), ids).dtype == torch.float32
    monkeypatch.setattr(logit_statistics, "BLOCK_ELEMENTS", 70)
    assert torch.equal(Support(top_p=0.7).compute(logits, ids), whole)
    assert Support(top_p=0.7).compute(logits[:0], ids[:0]).shape == (0,)


def test_impossible_tokens_and_nan():
    logits, ids = rows(2)
    logits[0, 1:] = -torch.inf
    logits[1, 3] = torch.nan
    ids[0] = 0
    for filters in FILTERS:
        found = Support(**filters).compute(logits, ids)
        assert found[0] == 0.0 and found[1].isnan(), filters
