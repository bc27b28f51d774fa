"""DPO by value: losses of pairs, written out pair by pair."""

import math
from dataclasses import replace

import pytest
import torch
from batches import logged, make_batches, make_group, token_values
from dpo_runs import ld_sum, losses_of

from trl.algorithms.dpo import DPO
from trl.batch import Step
from trl.distributed import Ranks
from trl.online.metrics import MetricStore
from trl.ops.preference_losses import PairOptions
from trl.types import TokenScores

LENGTHS = [(3, 1), (2, 4), (1, 2), (2, 2)]
GROUPS = [make_group(lengths, row=row) for row, lengths in enumerate(LENGTHS)]
FILLER = make_group((2, 3), row=9, is_filler=True)
SMOOTHED = ("smoothed", "exo_pair", "robust")


def make(name="sigmoid", **options):
    smoothing = 0.1 if name in (*SMOOTHED, "aot", "aot_unpaired") else 0.0
    name = {"smoothed": "sigmoid"}.get(name, name)
    pair_options = PairOptions(beta=0.1, label_smoothing=smoothing)
    return DPO(losses={name: 1.0}, options=pair_options, **options)


def answers_of(values):
    """Values of the tokens of each pair's answers, without padding."""
    return [
        (values[2 * pair, :chosen], values[2 * pair + 1, :rejected])
        for pair, (chosen, rejected) in enumerate(LENGTHS)
    ]


def log_ratios(logps, reference, alpha=1.0):
    """Log-ratios (P, 2), pair by pair."""

    def sums(values):
        pairs = [(ld_sum(c, r, alpha), ld_sum(r, c, alpha)) for c, r in answers_of(values)]
        return torch.stack([torch.stack(pair) for pair in pairs])

    return sums(logps) - sums(reference)


def share(terms):
    """The loss of a batch, as the training loop makes it of the terms."""
    return sum(losses / total for losses, total in terms.values())


@pytest.mark.parametrize(
    "name",
    [
        "sigmoid",
        "smoothed",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "sigmoid_norm",
    ],
)
def test_losses_of_pairs_without_those_of_fillers(name):
    (batch,) = make_batches([*GROUPS, FILLER])
    logps, reference = token_values(batch).requires_grad_(), token_values(batch, 1)
    batch = batch.with_columns(ref_logps=reference)
    loss = share(make(name).loss(TokenScores(logps), batch, MetricStore()))
    gradient = torch.autograd.grad(loss, logps)[0]

    lengths = torch.tensor(LENGTHS)
    ratios = log_ratios(logps, reference)
    wanted = losses_of(name, *ratios.unbind(1), *lengths.unbind(1)).mean()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()))
    gradient = torch.where(logps < 0, gradient, 0.0)  # of tokens; nothing reads it beyond the end
    assert torch.allclose(gradient, torch.autograd.grad(wanted, logps)[0])


def test_several_losses_and_the_likelihood_of_chosen_answers():
    (batch,) = make_batches(GROUPS)
    logps, reference = token_values(batch), token_values(batch, 1)
    batch = batch.with_columns(ref_answer_logps=reference.sum(1))
    algorithm = replace(make(), losses={"sigmoid": 1.0, "hinge": 0.5, "sft": 0.25})
    terms = algorithm.loss(TokenScores(logps), batch, MetricStore())

    c, r = log_ratios(logps, reference).unbind(1)
    pairs = losses_of("sigmoid", c, r, None, None) + 0.5 * losses_of("hinge", c, r, None, None)
    chosen = torch.cat([answer for answer, _ in answers_of(logps)])
    assert float(share(terms)) == pytest.approx(float(pairs.mean() - 0.25 * chosen.mean()))
    assert terms["pairs"][1] == 4 and terms["sft"][1] == 3 + 2 + 1 + 2


def test_tokens_beyond_the_shorter_answer_weigh_ld_alpha_under_policy_and_reference():
    (batch,) = make_batches(GROUPS)
    logps, reference = token_values(batch), token_values(batch, 1)
    loss = make(ld_alpha=0.3).loss(
        TokenScores(logps), batch.with_columns(ref_logps=reference), MetricStore()
    )
    c, r = log_ratios(logps, reference, 0.3).unbind(1)
    assert float(share(loss)) == pytest.approx(float(losses_of("sigmoid", c, r, 0, 0).mean()))


def test_pairs_are_weighted_by_how_likely_their_answers_are():
    (batch,) = make_batches(GROUPS)
    logps, reference = token_values(batch), token_values(batch, 1)
    collisions = token_values(batch, 2, -1.0)
    batch = batch.with_columns(ref_logps=reference)
    algorithm = make(use_weighting=True)
    assert algorithm.needs.statistic is not None and make().needs.statistic is None
    loss = algorithm.loss(TokenScores(logps, log_collision=collisions), batch, MetricStore())

    weights = [
        math.exp(sum(float((tokens - other).mean()) for tokens, other in zip(*pair, strict=True)))
        for pair in zip(answers_of(logps), answers_of(collisions), strict=True)
    ]
    c, r = log_ratios(logps, reference).unbind(1)
    losses = losses_of("sigmoid", c, r, None, None) * torch.tensor(weights)
    assert float(share(loss)) == pytest.approx(float(losses.mean()))
    with pytest.raises(ValueError, match="log_collision"):
        algorithm.loss(TokenScores(logps), batch, MetricStore())


def test_without_reference_all_answers_are_equally_likely():
    (batch,) = make_batches(GROUPS)
    logps, algorithm = token_values(batch), make(has_reference=False)
    assert not algorithm.needs.ref_logps and make().needs.ref_logps
    c, r = log_ratios(logps, torch.zeros_like(logps)).unbind(1)
    found = share(algorithm.loss(TokenScores(logps), batch, MetricStore()))
    assert float(found) == pytest.approx(float(losses_of("sigmoid", c, r, None, None).mean()))


def aot_by_hand(name, logps, reference):
    """Losses of sorted margins, or of sorted log-ratios of both sides: the value alone."""
    if name == "aot_unpaired":
        c, r = log_ratios(logps, reference).unbind(1)
        return losses_of(name, c, r, None, None)
    zeros = torch.zeros_like(logps)
    policy, known = log_ratios(logps, zeros), log_ratios(reference, zeros)
    margins = [(x[:, 0] - x[:, 1]).sort().values for x in (policy, known)]
    smoothed = torch.nn.functional.logsigmoid
    x = 0.1 * (margins[0] - margins[1])
    return -0.9 * smoothed(x) - 0.1 * smoothed(-x)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 2]])
def test_aot_compares_the_answers_of_the_whole_step(name, sizes):
    groups = [*GROUPS, FILLER]
    (whole,) = make_batches(groups)
    logps, reference = token_values(whole), token_values(whole, 1)
    batches = make_batches(groups, sizes, old_logps=logps, ref_logps=reference)
    algorithm = make(name)
    assert algorithm.needs.old_logps and not make().needs.old_logps
    step = algorithm.credit(Step(batches=batches, ranks=Ranks()), MetricStore())
    loss, row = 0.0, 0
    for batch in step.batches:
        scores = TokenScores(logps[row : row + len(batch), : batch.loss_mask.shape[1]])
        loss += share(algorithm.loss(scores, batch, MetricStore()))
        row += len(batch)
    assert float(loss) == pytest.approx(float(aot_by_hand(name, logps, reference).mean()))


class _SecondOfTwo(Ranks):
    """The second of two ranks; the first one has the pairs `others`."""

    def __init__(self, others):
        super().__init__()
        self.rank, self.others = 1, others

    def gather_objects(self, value):
        return [self.others, value]


def test_aot_compares_the_answers_of_all_ranks():
    (whole,) = make_batches(GROUPS)
    logps, reference = token_values(whole), token_values(whole, 1)
    first, second = make_batches(GROUPS, [1, 3], old_logps=logps, ref_logps=reference)
    algorithm = make("aot_unpaired")
    together = algorithm.credit(Step(batches=[first, second], ranks=Ranks()), MetricStore())
    others = torch.stack([first.columns[name].sum(1) for name in ("old_logps", "ref_logps")])
    alone = algorithm.credit(
        Step(batches=[second], ranks=_SecondOfTwo(others[None])), MetricStore()
    )
    names = [step.batches[-1].columns["aot_unpaired_logps"] for step in (together, alone)]
    assert torch.allclose(*names)


def test_metrics_are_means_over_pairs():
    (batch,) = make_batches([*GROUPS, FILLER])
    logps, entropies = token_values(batch), token_values(batch, 4, 0.0, 2.0)
    hits = token_values(batch, 5) < -1.5
    logps[6:8, :2] = logps[6, :2]  # a pair of equal answers
    reference = torch.where(logps < 0, -1.0, 0.0).double()
    batch, metrics = batch.with_columns(ref_logps=reference), MetricStore()
    make().loss(TokenScores(logps, entropies=entropies, hits=hits), batch, metrics)
    found = logged(metrics)

    c, r = log_ratios(logps, reference).unbind(1)
    assert found["rewards/chosen"] == pytest.approx(0.1 * float(c.mean()))
    assert found["rewards/rejected"] == pytest.approx(0.1 * float(r.mean()))
    assert found["rewards/margins"] == pytest.approx(0.1 * float((c - r).mean()))
    assert found["rewards/accuracies"] == float((c > r).double().mean())
    assert found["rewards/ties"] == 0.25
    tokens = torch.cat([torch.cat(pair) for pair in answers_of(entropies)])
    assert found["entropy"] == pytest.approx(float(tokens.mean()))
    chosen_hits = torch.cat([chosen for chosen, _ in answers_of(hits)])
    assert found["mean_token_accuracy"] == pytest.approx(float(chosen_hits.double().mean()))
