import pytest
import torch
from transformers import LogitsProcessorList

from trl.generation.base import Sampling
from trl.generation.transformers.sampler import (
    NonFiniteLogitsError,
    RepetitionPenalty,
    RowSampler,
    logits_warpers,
    sample_tokens,
    uniform_draws,
)

CPU = torch.device("cpu")


def test_pick_inverts_the_distribution():
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3])
    scores = probabilities.log().expand(7, -1)
    draws = torch.tensor([0.0, 0.05, 0.0999, 0.1001, 0.6999, 0.7001, 0.999999], dtype=torch.float64)
    assert sample_tokens(scores, draws).tolist() == [0, 0, 0, 2, 2, 3, 3]


def test_pick_never_takes_an_impossible_token():
    scores = torch.full((1001, 50), -torch.inf)
    scores[:, 17] = 0.0
    scores[:, 31] = 3.0
    chosen = sample_tokens(scores, torch.linspace(0, 1 - 1e-12, 1001, dtype=torch.float64))
    assert set(chosen.tolist()) == {17, 31}


@pytest.mark.parametrize(
    "bad", [[torch.nan, 0.0, 0.0], [0.0, torch.inf, 0.0], [-torch.inf] * 3, [torch.nan] * 3]
)
def test_logits_without_a_distribution_give_an_id_and_are_found(bad):
    """Their rows alone, also if it was long ago."""
    draws = uniform_draws((7, 8, 9), 2)
    scores = torch.tensor([[0.0, 1.0, -torch.inf], bad, [2.0, 0.0, 1.0]])
    chosen = sample_tokens(scores, draws[:, 0])
    assert 0 <= chosen[1] < 3
    assert torch.equal(chosen[[0, 2]], sample_tokens(scores[[0, 2]], draws[[0, 2], 0]))
    sampler = RowSampler(Sampling(max_tokens=2, seeds=(7, 8, 9)), CPU, prompt_width=1)
    sampler(torch.zeros(3, 1, dtype=torch.long), scores)
    sampler(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 3))
    with pytest.raises(NonFiniteLogitsError, match="logits of row 1 are NaN"):
        sampler.check()


def test_frequencies_follow_temperature_and_filters():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    sampling = Sampling(max_tokens=1, temperature=0.5, top_k=4, top_p=0.99)
    count = 20_000
    draws = uniform_draws(range(count), 1)[:, 0]
    warped = logits_warpers(sampling)(
        torch.zeros(count, 1, dtype=torch.long), logits.repeat(count, 1)
    )
    frequencies = torch.bincount(sample_tokens(warped, draws), minlength=5) / count
    # By hand: softmax of logits / 0.5 over the 4 best, of which 3 hold 0.99 of the mass.
    kept = (logits[:3] / 0.5).softmax(0)
    error = (kept * (1 - kept) / count).sqrt()
    assert ((frequencies[:3] - kept).abs() < 4 * error).all()
    assert frequencies[3:].sum() == 0


def test_min_p_drops_unlikely_tokens():
    chain = logits_warpers(Sampling(max_tokens=1, min_p=0.5))
    scores = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert chain(torch.zeros(1, 1, dtype=torch.long), scores).isinf().tolist() == [[0, 0, 1]]


def test_streams_belong_to_rows():
    together = uniform_draws([3, 5, 7], 4)
    assert torch.equal(uniform_draws([5], 4)[0], together[1])
    assert torch.equal(uniform_draws([5], 2)[0], together[1, :2])
    assert not torch.equal(together[0], together[1])


def test_row_sampler_decides_by_place():
    sampling = Sampling(max_tokens=3, seeds=(11, 12))
    sampler = RowSampler(sampling, CPU, prompt_width=2)
    scores = torch.zeros(2, 6)
    draws = uniform_draws((11, 12), 3)
    for place in range(3):
        decided = sampler(torch.zeros(2, 2 + place, dtype=torch.long), scores)
        assert (decided == 0).sum(1).tolist() == [1, 1]
        assert decided.argmax(1).tolist() == (draws[:, place] * 6).long().tolist()


def test_without_filters_the_chain_is_empty():
    assert isinstance(logits_warpers(Sampling(max_tokens=1)), LogitsProcessorList)
    assert len(logits_warpers(Sampling(max_tokens=1))) == 0


def test_padding_is_not_a_token_that_a_row_has():
    """The first row has token 0 as padding alone, the second one as a token of its own."""
    ids, scores = torch.tensor([[0, 0, 3, 3], [0, 2, 0, 1]]), torch.tensor([[4.0, -1.0, -2.0, 6.0]])
    found = RepetitionPenalty(2.0, torch.tensor([2, 1]))(ids, scores.repeat(2, 1))
    assert found.tolist() == [[4.0, -1.0, -2.0, 3.0], [2.0, -2.0, -4.0, 6.0]]
