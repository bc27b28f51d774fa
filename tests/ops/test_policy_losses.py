import math

import pytest
import torch

from trl.ops.kl import k3
from trl.ops.policy_losses import (
    MODES,
    RatioBounds,
    cispo,
    clip_flags,
    clipped_surrogate,
    importance_ratio,
    log_ratio,
    mean_of_sequence_means,
    off_policy_mask,
    sapo,
    scale_gradient,
    sum_over,
    vespo,
    vespo_weight,
)

NAN = torch.nan
LENGTHS = (4, 1, 0, 3, 5)
ROWS, WIDTH, TOKENS = len(LENGTHS), max(LENGTHS), sum(LENGTHS)
EPSILON, EPSILON_HIGH, DELTA, CAP = 0.2, 0.3, 1.6, 1.5
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05
SHAPE_POSITIVE, SHAPE_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
DENOMINATORS = {
    "dapo": TOKENS / 2.5,
    "cispo": TOKENS / 2.5,
    "vespo": TOKENS / 2.5,
    "bnpo": TOKENS,
    "dr_grpo": ROWS * 7,
    "luspo": ROWS,
    "grpo": ROWS,
    "sapo": ROWS,
}


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def example(per_token, spread=0.4):
    """Log-probs, old log-probs and advantages in which every branch of a clip is taken."""
    generator = torch.Generator().manual_seed(3)
    logps = -3 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    moved = spread * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    advantages = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    return logps, logps - moved, advantages if per_token else advantages[:, 0], mask


# --- The slow side: one token at a time, on scalars ---


def slow_ratio(logps, old_logps, level):
    """Ratio of each token of one row, as scalars that carry a gradient."""
    differences = [a - b for a, b in zip(logps, old_logps, strict=True)]
    if level == "token":
        return [difference.exp() for difference in differences]
    total = differences[0]
    for difference in differences[1:]:
        total = total + difference
    if level == "sequence_mean":
        total = total / len(differences)
    return [total.exp()] * len(differences)


def slow_clipped(ratio, advantage, delta):
    clipped = ratio
    if ratio < 1 - EPSILON:
        clipped = torch.full_like(ratio, 1 - EPSILON)
    elif ratio > 1 + EPSILON_HIGH:
        clipped = torch.full_like(ratio, 1 + EPSILON_HIGH)
    if delta is not None and ratio > delta:
        ratio = torch.full_like(ratio, delta)
    plain, bounded = ratio * advantage, clipped * advantage
    return -(plain if plain < bounded else bounded)


def slow_sapo(ratio, advantage):
    tau = TAU_POSITIVE if advantage > 0 else TAU_NEGATIVE
    return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage


def slow_phi(logps, old_logps, advantage):
    log_w = 0.0
    for a, b in zip(logps.tolist(), old_logps.tolist(), strict=True):
        log_w += min(max(a - b, -20.0), 20.0)
    w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
    k, decay = SHAPE_POSITIVE if advantage >= 0 else SHAPE_NEGATIVE
    return w**k * math.exp(decay * (1 - w))


def slow_token_loss(kind, ratio, logp, advantage, phi):
    if kind == "cispo":
        return -min(ratio.item(), CAP) * advantage * logp
    if kind == "vespo":
        return -phi * advantage * logp
    if kind == "sapo":
        return slow_sapo(ratio, advantage)
    return slow_clipped(ratio, advantage, DELTA if kind == "bnpo" else None)


def slow_loss(kind, level, logps, old_logps, advantages):
    total = logps.new_zeros(())
    for i, length in enumerate(LENGTHS):
        if length == 0:
            continue
        row, old = logps[i, :length], old_logps[i, :length]
        row_total = logps.new_zeros(())
        for t, ratio in enumerate(slow_ratio(row, old, level)):
            advantage = advantages[i, t] if advantages.dim() == 2 else advantages[i]
            phi = slow_phi(row, old, advantage)
            row_total = row_total + slow_token_loss(kind, ratio, row[t], advantage, phi)
        total = total + (row_total / length if kind in ("grpo", "sapo") else row_total)
    return total / DENOMINATORS[kind]


# --- The fast side ---


def fast_loss(kind, level, logps, old_logps, advantages, mask):
    ratio = importance_ratio(logps, old_logps, mask, level)
    if kind == "cispo":
        losses = cispo(ratio, logps, advantages, CAP)
    elif kind == "vespo":
        differences = log_ratio(logps, old_logps, mask, "token")
        phi = vespo_weight(differences, mask, advantages, SHAPE_POSITIVE, SHAPE_NEGATIVE)
        losses = vespo(phi, logps, advantages)
    elif kind == "sapo":
        losses = sapo(ratio, advantages, TAU_POSITIVE, TAU_NEGATIVE)
    else:
        delta = DELTA if kind == "bnpo" else None
        losses = clipped_surrogate(ratio, advantages, EPSILON, EPSILON_HIGH, delta)
    if kind in ("grpo", "sapo"):
        return mean_of_sequence_means(losses, mask, tensor(DENOMINATORS[kind]))
    return sum_over(losses, mask, DENOMINATORS[kind])


def value_and_gradient(loss, logps):
    logps = logps.clone().requires_grad_()
    value = loss(logps)
    value.backward()
    return value.detach(), logps.grad


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("kind", DENOMINATORS)
def test_loss_and_gradient_are_those_of_a_loop_over_tokens(kind, level, per_token):
    logps, old_logps, advantages, mask = example(per_token)
    expected, expected_grad = value_and_gradient(
        lambda x: slow_loss(kind, level, x, old_logps, advantages), logps
    )
    value, grad = value_and_gradient(
        lambda x: fast_loss(kind, level, x, old_logps, advantages, mask), logps
    )
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", DENOMINATORS)
@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_junk_beyond_a_completion_changes_nothing(kind, level):
    logps, old_logps, advantages, mask = example(per_token=False)

    def run(ours, theirs):
        return value_and_gradient(
            lambda x: fast_loss(kind, level, x, theirs, advantages, mask), ours
        )

    value, grad = run(logps.where(mask, 0.0), old_logps.where(mask, 0.0))
    for junk in (NAN, torch.inf, -torch.inf, 1e30):
        for ours, theirs in ((junk, 0.0), (0.0, junk), (junk, junk)):
            found, found_grad = run(logps.where(mask, ours), old_logps.where(mask, theirs))
            assert torch.equal(found, value)
            assert torch.equal(found_grad, grad)
    assert not grad[~mask].any()


@pytest.mark.parametrize("kind", DENOMINATORS)
def test_a_row_without_trained_tokens_changes_neither_siblings_nor_loss(kind):
    logps, old_logps, advantages, mask = example(per_token=False)
    excluded = mask.clone()
    excluded[3] = False
    others = [0, 1, 2, 4]
    full = fast_loss(kind, "token", logps, old_logps, advantages, excluded)
    rest = fast_loss(
        kind, "token", logps[others], old_logps[others], advantages[others], mask[others]
    )
    torch.testing.assert_close(full, rest, rtol=1e-14, atol=1e-15)


# --- Ratios ---


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_ratio_of_the_policy_to_itself_is_one(level):
    logps, _, _, mask = example(per_token=False)
    ratio = importance_ratio(logps.float(), logps.float().clone(), mask, level)
    assert ratio.shape == ((ROWS, WIDTH) if level == "token" else (ROWS, 1))
    assert torch.equal(ratio, torch.ones_like(ratio))


@pytest.mark.parametrize("advantage", [-1.7, 0.3, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence_sum"])
def test_on_policy_gradient_is_exactly_that_of_reinforce(level, advantage):
    logps, _, _, mask = example(per_token=False)
    logps = logps.float()
    advantages = torch.full((ROWS,), advantage)

    def surrogate(x):
        ratio = importance_ratio(x, x.detach(), mask, level)
        losses = clipped_surrogate(ratio, advantages, EPSILON, EPSILON_HIGH)
        return losses.where(mask, 0.0).sum() if level == "token" else losses.sum()

    def reinforce(x):
        return -(x * advantages[:, None]).where(mask, 0.0).sum()

    assert torch.equal(
        value_and_gradient(surrogate, logps)[1], value_and_gradient(reinforce, logps)[1]
    )


def test_sums_of_differences_keep_the_digits_of_long_completions():
    generator = torch.Generator().manual_seed(0)
    old_logps = -2 * torch.rand(1, 2048, generator=generator)
    logps = old_logps + 1e-3 * torch.randn(1, 2048, generator=generator)
    mask = torch.ones(1, 2048, dtype=torch.bool)
    exact = (logps.double() - old_logps.double()).sum()
    found = log_ratio(logps, old_logps, mask, "sequence_sum").double().squeeze()
    assert (found - exact).abs() < 1e-7
    assert (logps.sum() - old_logps.sum() - exact).abs() > 1e-5


@pytest.mark.parametrize("moved", [1e4, -1e4])
@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_ratios_do_not_overflow(moved, level):
    logps = torch.full((1, 3), moved, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    ratio = importance_ratio(logps, torch.zeros(1, 3), mask, level)
    assert ratio.detach()[0, 0].item() == pytest.approx(
        math.exp(math.copysign(20, moved)), rel=1e-6
    )
    (-ratio).sum().backward()
    assert logps.grad.isfinite().all()


def test_a_nan_on_a_trained_token_stays_visible():
    logps = torch.tensor([[NAN, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for level in ("token", "sequence_mean", "sequence_sum"):
        assert importance_ratio(logps, torch.zeros(1, 2), mask, level)[0, 0].isnan()


def test_an_unknown_level_names_the_legal_ones():
    with pytest.raises(ValueError, match="token, sequence_mean or sequence_sum, not 'row'"):
        log_ratio(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool(), "row")


# --- Objectives by hand ---


@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "loss", "slope"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.5, 2.0, None, -2.6, 0.0),
        (1.5, -2.0, None, 3.0, 2.0),
        (0.5, 2.0, None, -1.0, -2.0),
        (0.5, -2.0, None, 1.6, 0.0),
        (9.0, -2.0, 4.0, 8.0, 0.0),
        (3.0, -2.0, 4.0, 6.0, 2.0),
        (9.0, 2.0, 4.0, -2.6, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, delta, loss, slope):
    ratio = tensor([[ratio]]).requires_grad_()
    found = clipped_surrogate(ratio, tensor([advantage]), EPSILON, EPSILON_HIGH, delta)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-15)
    assert ratio.grad.item() == pytest.approx(slope, abs=1e-15)


def test_clip_flags_mark_where_the_gradient_is_gone():
    ratios = tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5], [0.5, 1.0, 1.5]]).requires_grad_()
    advantages = tensor([1.0, -1.0, 0.0])
    low, high = clip_flags(ratios, advantages, EPSILON, EPSILON_HIGH)
    assert low.tolist() == [[False] * 3, [True, False, False], [False] * 3]
    assert high.tolist() == [[False, False, True], [False] * 3, [False] * 3]
    clipped_surrogate(ratios, advantages, EPSILON, EPSILON_HIGH).sum().backward()
    assert torch.equal((ratios.grad == 0)[:2], (low | high)[:2])


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    logps = tensor([[-1.0, -1.0]]).requires_grad_()
    cispo(tensor([[0.5, 9.0]]), logps, tensor([2.0]), 1.28).sum().backward()
    torch.testing.assert_close(logps.grad, tensor([[-1.0, -2.56]]), rtol=1e-15, atol=0)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (0.0, 1.05), (-2.0, 1.05)])
def test_sapo_gate_has_the_slope_of_the_plain_ratio_at_one(advantage, tau):
    ratio = tensor([[1.0]]).requires_grad_()
    loss = sapo(ratio, tensor([advantage]), 1.0, 1.05)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-2 / tau * advantage, abs=1e-15)
    assert ratio.grad.item() == pytest.approx(-advantage, abs=1e-15)


@pytest.mark.parametrize(
    ("advantage", "shape"), [(1.0, (2.0, 3.0)), (0.0, (2.0, 3.0)), (-1.0, (3.0, 2.0))]
)
def test_vespo_weight_is_one_on_policy_and_largest_at_k_over_lambda(advantage, shape):
    k, decay = shape

    def weight(log_w):
        return vespo_weight(
            tensor([[log_w]]),
            torch.ones(1, 1).bool(),
            tensor([advantage]),
            SHAPE_POSITIVE,
            SHAPE_NEGATIVE,
        ).item()

    assert weight(0.0) == pytest.approx(1.0, abs=1e-15)
    peak = math.log(k / decay)
    assert weight(peak) == pytest.approx((k / decay) ** k * math.exp(decay - k), rel=1e-14)
    assert weight(peak) > max(weight(peak - 0.1), weight(peak + 0.1))


@pytest.mark.parametrize(
    ("log_ratios", "expected"),
    [
        ([-50.0, 0.0], 1e-8**2 * math.exp(3 * (1 - 1e-8))),
        ([-50.0, 30.0], math.exp(3.0) * math.exp(-3.0)),
        ([50.0, 50.0], 0.0),
        ([NAN, 50.0], 0.0),
    ],
)
def test_vespo_bounds_tokens_and_their_sum(log_ratios, expected):
    mask = torch.tensor([[not math.isnan(x) for x in log_ratios]])
    found = vespo_weight(tensor([log_ratios]), mask, tensor([1.0]), (2.0, 3.0), (3.0, 2.0))
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_vespo_weight_carries_no_gradient():
    logps = tensor([[-1.0, -2.0]]).requires_grad_()
    weight = vespo_weight(logps, torch.ones(1, 2).bool(), tensor([1.0]), (2.0, 3.0), (3.0, 2.0))
    assert not weight.requires_grad


# --- The off-policy mask ---


def test_off_policy_mask_drops_only_far_rows_of_negative_advantage():
    logps = tensor([[-3.0, -3.0], [-3.0, -3.0], [-1.0, -9.0], [-3.0, -3.0]]).requires_grad_()
    old_logps = tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.5, 0.0], [-3.5, -3.5]])
    mask = torch.tensor([[True, True], [True, True], [True, False], [True, True]])
    kept = off_policy_mask(logps, old_logps, tensor([0.5, -0.5, -0.5, -0.5]), mask, 1.0)
    assert kept.tolist() == [[True], [False], [True], [True]]


@pytest.mark.parametrize(("threshold", "kept"), [(0.99, False), (1.0, True)])
def test_off_policy_mask_compares_the_mean_and_counts_unreported_tokens_as_zero(threshold, kept):
    logps, old_logps = tensor([[-3.0, -3.0]]), tensor([[-1.0, NAN]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = off_policy_mask(logps, old_logps, tensor([-1.0]), mask, threshold)
    assert found.tolist() == [[kept]]


def test_off_policy_mask_of_token_advantages():
    logps, old_logps = tensor([[-3.0, -3.0]]), tensor([[-1.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = off_policy_mask(logps, old_logps, tensor([[-1.0, 1.0]]), mask, 1.0)
    assert found.tolist() == [[False, True]]


# --- Averages ---

LOSSES = tensor([[1.0, 2.0, 6.0], [5.0, NAN, NAN], [NAN, NAN, NAN]])
MARKED = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def test_averages_by_hand():
    assert mean_of_sequence_means(LOSSES, MARKED, 2.0).item() == 4.0
    assert sum_over(LOSSES, MARKED, 4).item() == 3.5
    per_row = tensor([[2.0], [5.0], [7.0]])
    assert mean_of_sequence_means(per_row, MARKED, tensor(2.0)).item() == 3.5
    assert sum_over(per_row, MARKED, tensor(4.0)).item() == 11 / 4


def test_one_denominator_makes_the_cut_into_micro_batches_irrelevant():
    logps, old_logps, advantages, mask = example(per_token=False)
    whole = fast_loss("dapo", "token", logps, old_logps, advantages, mask)
    parts = [
        fast_loss("dapo", "token", logps[i], old_logps[i], advantages[i], mask[i])
        for i in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-15)


def test_bias_corrected_kl_has_the_gradient_of_the_divergence():
    policy = tensor([0.3, -0.2, 0.1]).requires_grad_()
    reference = tensor([0.0, 0.5, -0.4]).log_softmax(0)
    old = tensor([-0.3, 0.4, 0.2]).log_softmax(0)
    logps = policy.log_softmax(0)[:, None]
    mask = torch.ones(3, 1, dtype=torch.bool)
    ratio = importance_ratio(logps, old[:, None], mask, "token")
    estimate = (old.exp()[:, None] * ratio * k3(logps, reference[:, None], mask)).sum()
    exact = (logps[:, 0].exp() * (logps[:, 0] - reference)).sum()
    torch.testing.assert_close(estimate, exact, rtol=1e-13, atol=0)
    grads = [torch.autograd.grad(x, policy, retain_graph=True)[0] for x in (estimate, exact)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)


# --- Tokens drawn with other probabilities ---


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
