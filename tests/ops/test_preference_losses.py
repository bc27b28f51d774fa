"""Losses on preferences, by value against formulas in plain floating-point arithmetic."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl.ops.preference_losses import (
    AOT_LOSSES,
    DIVERGENCES,
    PAIR_LOSSES,
    WITHOUT_DIVERGENCE,
    PairOptions,
    PairScores,
    kl_partners,
    kto_loss,
    rank_partners,
    ranking_loss,
    shared_length_weights,
)

BOUND = {"rtol": 1e-12, "atol": 1e-12}
CHOSEN = [0.7, -3.1, 12.0, 0.0, -0.2, 4.4]
REJECTED = [-1.3, 2.2, -9.5, 0.0, -0.1, 4.5]
CHOSEN_LENGTHS = [3, 17, 5, 1, 8, 2]
REJECTED_LENGTHS = [4, 2, 5, 1, 80, 3]


def sig(x):
    return 1 / (1 + math.exp(-x)) if x > -500 else 0.0


def ls(x):
    return -math.log1p(math.exp(-x)) if x > -500 else x


def divergence(kind, x, a):
    return {
        "reverse_kl": lambda: x,
        "forward_kl": lambda: 1 - math.exp(-x),
        "js_divergence": lambda: math.log(2) + ls(x),
        "alpha_divergence": lambda: x if a == 1 else (math.exp((a - 1) * x) - 1) / (a - 1),
    }[kind]()


def by_hand(name, c, r, nc, nr, o):
    """The formulas of the papers for one pair."""
    b, e = o.beta, o.label_smoothing
    gc, gr = (divergence(o.f_divergence_type, x, o.f_alpha_divergence_coef) for x in (c, r))
    d = b * (gc - gr)
    m = sig(d / o.discopop_tau) if abs(d / o.discopop_tau) < 700 else float(d > 0)
    return {
        "sigmoid": lambda: -(1 - e) * ls(d) - e * ls(-d),
        "hinge": lambda: max(0.0, 1 - d),
        "ipo": lambda: (gc / nc - gr / nr - 1 / (2 * b)) ** 2,
        "exo_pair": lambda: sig(d) * (ls(d) - math.log(1 - e)) + sig(-d) * (ls(-d) - math.log(e)),
        "nca_pair": lambda: -ls(b * c) - ls(-b * c) / 2 - ls(-b * r) / 2,
        "robust": lambda: (-(1 - e) * ls(d) + e * ls(-d)) / (1 - 2 * e),
        "bco_pair": lambda: -ls(b * c) - ls(-b * r),
        "sppo_hard": lambda: (c - 1 / (2 * b)) ** 2 + (r + 1 / (2 * b)) ** 2,
        "apo_zero": lambda: 1 - sig(b * c) + sig(b * r),
        "apo_down": lambda: sig(b * c) + 1 - sig(b * (c - r)),
        "discopop": lambda: -ls(d) * (1 - m) + math.exp(-d) * m,
        "sigmoid_norm": lambda: -ls(b * (gc / nc - gr / nr)),
    }[name]()


def pairs(**changes):
    values = {
        "chosen": torch.tensor(CHOSEN, dtype=torch.float64),
        "rejected": torch.tensor(REJECTED, dtype=torch.float64),
        "chosen_lengths": torch.tensor(CHOSEN_LENGTHS),
        "rejected_lengths": torch.tensor(REJECTED_LENGTHS),
    }
    return PairScores(**(values | changes))


def cases():
    for name in PAIR_LOSSES:
        for kind in DIVERGENCES if name not in WITHOUT_DIVERGENCE else ["reverse_kl"]:
            if name not in AOT_LOSSES:
                yield name, kind


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("beta", [0.1, 0.6])
@pytest.mark.parametrize(("name", "kind"), cases())
def test_each_loss_is_its_formula(name, kind, beta, alpha):
    options = PairOptions(
        beta=beta,
        label_smoothing=0.2,
        f_divergence_type=kind,
        f_alpha_divergence_coef=alpha,
        discopop_tau=0.3,
    )
    rows = zip(CHOSEN, REJECTED, CHOSEN_LENGTHS, REJECTED_LENGTHS, strict=True)
    expected = torch.tensor([by_hand(name, *row, options) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(PAIR_LOSSES[name](pairs(), options), expected, **BOUND)


@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - set(AOT_LOSSES)))
def test_answers_of_twice_the_tokens(name):
    """With the same log-ratio a token: means over tokens stay, sums of them move further."""
    short = pairs()
    twice = {name: 2 * values for name, values in vars(short).items() if values is not None}
    options = PairOptions(label_smoothing=0.2)
    found = [PAIR_LOSSES[name](x, options) for x in (short, PairScores(**twice))]
    moved = (found[1] - found[0]).abs()
    assert moved.max() <= 1e-12 if name in ("ipo", "sigmoid_norm") else moved.max() > 1e-3


def test_fourteen_losses_on_pairs_and_the_ones_without_a_divergence():
    assert len(PAIR_LOSSES) == 14  # the fifteenth, sft, is the mean over tokens of the chosen
    assert set(AOT_LOSSES) <= set(WITHOUT_DIVERGENCE) <= set(PAIR_LOSSES)


def test_without_a_difference_dpo_is_ln_2_and_its_gradient_is_half_of_beta():
    zero = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss = PAIR_LOSSES["sigmoid"](
        pairs(chosen=zero, rejected=torch.zeros_like(zero)), PairOptions()
    )
    torch.testing.assert_close(
        loss.detach(), torch.full((2,), math.log(2), dtype=torch.float64), **BOUND
    )
    loss.sum().backward()
    torch.testing.assert_close(zero.grad, torch.full((2,), -0.05, dtype=torch.float64), **BOUND)


def best_matching(values, others):
    """The assignment that one-dimensional transport of a convex cost chooses, by enumeration."""
    cost = lambda order: sum((v - o) ** 2 for v, o in zip(values, order, strict=True))  # noqa: E731
    return min(permutations(others), key=cost)


def test_partners_are_those_of_optimal_transport():
    values = torch.tensor([0.3, -2.0, 5.0, 1.0], dtype=torch.float64)
    others = torch.tensor([4.0, 0.0, -7.0, 2.5], dtype=torch.float64)
    expected = best_matching(values.tolist(), others.tolist())
    assert rank_partners(values, others).tolist() == list(expected)


@pytest.mark.parametrize("name", AOT_LOSSES)
def test_aot_in_any_split_is_aot_of_the_whole_step(name):
    torch.manual_seed(0)
    chosen, rejected, ref = (torch.randn(6, dtype=torch.float64) for _ in range(3))
    options = PairOptions(beta=0.3, label_smoothing=0.1)

    def smoothed(x):
        return -(0.9 * torch.log(torch.sigmoid(x)) + 0.1 * torch.log(torch.sigmoid(-x)))

    whole = [x.clone().requires_grad_() for x in (chosen, rejected)]
    if name == "aot":  # margins of the policy against those of the reference
        left, right = (whole[0] - whole[1]).sort().values, ref.sort().values
    else:
        left, right = whole[0].sort().values, whole[1].sort().values
    value = smoothed(0.3 * (left - right)).sum()
    value.backward()

    if name == "aot":
        partners = [rank_partners(chosen - rejected, ref), None]
    else:
        partners = [rank_partners(chosen, rejected), rank_partners(rejected, chosen)]
    split = [x.clone().requires_grad_() for x in (chosen, rejected)]
    total = 0.0
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        loss = PAIR_LOSSES[name](
            PairScores(
                chosen=split[0][part],
                rejected=split[1][part],
                chosen_lengths=torch.ones(6)[part],
                rejected_lengths=torch.ones(6)[part],
                chosen_partners=partners[0][part],
                rejected_partners=None if partners[1] is None else partners[1][part],
            ),
            options,
        ).sum()
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, value.detach(), **BOUND)
    for ours, theirs in zip(split, whole, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **BOUND)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_no_loss_overflows(name, kind):
    wide = torch.tensor([-5000.0, 5000.0, 0.0], requires_grad=True)
    known = torch.zeros(3)
    scores = pairs(
        chosen=wide,
        rejected=-wide,
        chosen_lengths=torch.ones(3),
        rejected_lengths=torch.ones(3),
        chosen_partners=known,
        rejected_partners=known,
    )
    loss = PAIR_LOSSES[name](scores, PairOptions(label_smoothing=0.1, f_divergence_type=kind))
    (gradient,) = torch.autograd.grad(loss.sum(), wide)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_weights_beyond_the_shorter_answer():
    weights = shared_length_weights(torch.tensor([3, 1]), torch.tensor([2, 5]), 4, 0.25)
    assert weights.tolist() == [[1, 1, 0.25, 0.25], [1, 0.25, 0.25, 0.25]]


@pytest.mark.parametrize("kl", [0.0, 0.8])
def test_kto_by_hand(kl):
    ratios = torch.tensor([0.5, -1.5, 3.0, 0.0], dtype=torch.float64)
    labels = torch.tensor([True, False, False, True])
    expected = [
        1 - sig(0.2 * (x - kl)) if good else 1 - sig(0.2 * (kl - x))
        for x, good in zip(ratios.tolist(), labels.tolist(), strict=True)
    ]
    found = kto_loss(ratios, labels, kl, 0.2)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **BOUND)


def test_reward_loss_by_hand():
    better = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    worse = torch.tensor([0.5, 3.0, 0.0], dtype=torch.float64)
    margin = torch.tensor([0.0, 0.3, 0.0], dtype=torch.float64)
    expected = [-ls(b - w - m) for b, w, m in zip(better, worse, margin, strict=True)]
    torch.testing.assert_close(
        ranking_loss(better, worse, margin), torch.tensor(expected, dtype=torch.float64), **BOUND
    )
    assert ranking_loss(better, worse)[2].item() == pytest.approx(math.log(2), abs=1e-15)
    torch.testing.assert_close(
        ranking_loss(better + 7.5, worse + 7.5), ranking_loss(better, worse), **BOUND
    )


def test_swapping_a_pair_flips_the_gradient_where_scores_are_equal():
    scores = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ranking_loss(scores[:1], scores[1:]).sum().backward()
    assert scores.grad.tolist() == [-0.5, 0.5]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_a_partner_has_another_answer_and_comes_from_another_example(rows):
    possible = all(any(s != t and a != b for t, b in rows) for s, a in rows)
    if not possible:
        with pytest.raises(ValueError, match="has no partner"):
            list(kl_partners((a, s, i) for i, (s, a) in enumerate(rows)))
        return
    found = dict(kl_partners((a, s, i) for i, (s, a) in enumerate(rows)))
    assert sorted(found) == list(range(len(rows)))
    assert all(x != y for i, p in found.items() for x, y in zip(rows[i], rows[p], strict=True))


def test_a_partner_is_the_last_one_before_or_the_first_one_after():
    rows = [("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 3)]
    found = dict(kl_partners((answer, source, i) for i, (answer, source) in enumerate(rows)))
    assert found == {0: 2, 1: 3, 2: 0, 3: 1, 4: 3}
