import pytest
import torch

from trl.ops.entropy import entropy_threshold, high_entropy_mask


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.25, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_threshold_is_the_upper_quantile(count, share):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    expected = torch.quantile(values, 1 - share)
    torch.testing.assert_close(entropy_threshold(values, share), expected, rtol=1e-12, atol=1e-12)


def test_the_tokens_of_highest_entropy_are_kept():
    entropies = torch.tensor([[0.1, 2.0, 0.3, 9.0], [1.5, 0.2, 0.4, 1.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    threshold = entropy_threshold(entropies[mask], 0.3)
    kept = high_entropy_mask(entropies, mask, threshold)
    assert kept.tolist() == [[False, True, False, False], [True, False, False, False]]


def test_the_whole_share_keeps_every_marked_token():
    entropies = torch.tensor([[0.5, 0.1, 0.7]])
    mask = torch.tensor([[True, True, False]])
    kept = high_entropy_mask(entropies, mask, entropy_threshold(entropies[mask], 1.0))
    assert torch.equal(kept, mask)


def test_no_tokens_keep_nothing():
    assert entropy_threshold(torch.zeros(0), 0.5).item() == torch.inf
    assert entropy_threshold(torch.full((3,), -torch.inf), 0.5).item() == torch.inf


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_what_is_no_token_does_not_count(count, share):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count))
    nothing = torch.full((2,), -torch.inf)
    among = entropy_threshold(torch.cat([nothing, values, nothing]), share)
    assert torch.equal(among, entropy_threshold(values, share))


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_share_out_of_range(share):
    with pytest.raises(ValueError, match="top_quantile must be between 0 and 1"):
        entropy_threshold(torch.zeros(3), share)
