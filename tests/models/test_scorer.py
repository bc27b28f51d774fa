import pytest
import torch
from tiny import tiny_model

from trl.models.scorer import Scorer
from trl.types import Rollout

PROMPTS = [[8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]
COMPLETIONS = [[20, 21, 1], [22], [23, 24, 25, 26, 1]]


def rollout(prompts=PROMPTS, completions=COMPLETIONS) -> Rollout:
    width = max(map(len, completions))
    lengths = torch.tensor([len(ids) for ids in completions])
    return Rollout(
        prompt_ids=prompts,
        completion_ids=completions,
        row_ids=list(range(len(prompts))),
        loss_mask=torch.arange(width) < lengths[:, None],
        num_loss_tokens=lengths.sum(),
        num_loss_rows=torch.tensor(len(prompts)),
    )


def scorer(pad_id=0, temperature=1.0, **options) -> Scorer:
    return Scorer(
        pad_id=pad_id, temperature=temperature, device=torch.device("cpu"), **options
    )


def row_by_row(model, batch, temperature=1.0):
    """The definition: one unpadded row at a time, from full logits in one forward."""
    logps = torch.zeros(batch.loss_mask.shape, dtype=next(model.parameters()).dtype)
    entropies = torch.zeros_like(logps)
    rows = zip(batch.prompt_ids, batch.completion_ids, strict=True)
    for row, (prompt, completion) in enumerate(rows):
        logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
        for place, token in enumerate(completion):
            every = logits[len(prompt) + place - 1].log_softmax(-1)
            logps[row, place] = every[token]
            entropies[row, place] = -(every.exp() * every).sum()
    return logps, entropies


def gradient(model, values):
    model.zero_grad()
    values.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("pad_id", [0, 1, 50])
@pytest.mark.parametrize("multiple", [None, 8])
def test_padded_rows_equal_single_rows(kind, pad_id, multiple):
    model, batch = tiny_model(kind), rollout()
    weights = torch.linspace(-1, 1, batch.loss_mask.numel()).view(batch.loss_mask.shape)
    expected, expected_entropies = row_by_row(model, batch, temperature=0.7)
    reference = gradient(model, (expected * weights * batch.loss_mask).sum())
    score = scorer(pad_id, 0.7, pad_multiple=multiple)
    scores = score(model, batch, with_entropy=True)
    assert (scores.logps - expected).abs().max() < 1e-5
    assert (scores.entropies - expected_entropies).abs().max() < 1e-5
    ours = gradient(model, (scores.logps * weights * batch.loss_mask).sum())
    assert (ours - reference).norm() / reference.norm() < 5e-6


def test_places_beyond_the_end_are_zero():
    scores = scorer()(tiny_model(), rollout(), with_entropy=True)
    beyond = ~rollout().loss_mask
    assert (scores.logps[beyond] == 0).all() and (scores.entropies[beyond] == 0).all()
    assert (scores.logps[~beyond] < 0).all()


def test_a_row_does_not_depend_on_the_others():
    model = tiny_model()
    together = scorer()(model, rollout()).logps
    alone = scorer()(model, rollout().select([1])).logps
    assert (together[1, :1] - alone[0]).abs().max() < 1e-6


def test_double_precision_padding_has_no_nan():
    model = tiny_model().double()
    scores = scorer()(model, rollout())
    expected, _ = row_by_row(model, rollout())
    # Rotary tables are float32, so padding moves float64 results at that level.
    assert (scores.logps - expected).abs().max() < 1e-5
    assert gradient(model, scores.logps.sum()).isfinite().all()


def test_empty_completion_scores_nothing():
    batch = rollout(PROMPTS, [[], [22], [23]])
    scores = scorer()(tiny_model(), batch)
    assert scores.logps.shape == (3, 1)
    assert scores.logps[0] == 0
    nothing = scorer()(tiny_model(), rollout([[8]], [[]]))
    assert nothing.logps.shape == (1, 0)


def test_scoring_without_gradient_is_in_evaluation_mode():
    model, batch = tiny_model(attention_dropout=0.5).train(), rollout()
    whole = scorer()(model.eval(), batch).logps
    model.train()
    found = scorer().logps(model, batch)
    assert not found.requires_grad and model.training
    assert (found - whole).abs().max() < 1e-6
