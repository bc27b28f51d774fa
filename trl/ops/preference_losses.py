"""Losses on pairs of answers, on answers with a label, and on scores of a reward model.

Shapes: B pairs or answers of a micro-batch. Every loss is one number per pair or answer. Nothing is
averaged here: the trainer divides the sum by totals of the whole optimizer step. A log-ratio is the
log-probability of an answer under the policy minus its log-probability under the reference.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

T = TypeVar("T")
LOOKED_BACK = 64  # recent answers among which a partner is searched
EXPONENT_BOUND = 40.0  # exp(40) squared is finite in float32


@dataclass(frozen=True)
class PairScores:
    """What the losses read of B pairs: log-ratios, summed over tokens, and token counts."""

    chosen: Tensor  # (B,) log-ratio of the chosen answer
    rejected: Tensor  # (B,) log-ratio of the rejected answer
    chosen_lengths: Tensor  # (B,) tokens
    rejected_lengths: Tensor  # (B,) tokens
    # For aot losses: the value (B,) that each side is compared with, see `aot_partners`.
    chosen_partners: Tensor | None = None
    rejected_partners: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Options of the losses on pairs, under the names of the configuration."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05


def _alpha(x: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return x
    return ((alpha - 1) * x).clamp(max=EXPONENT_BOUND).expm1() / (alpha - 1)


# How a log-ratio enters a loss: the derivative of the divergence that regularizes the policy
# (f-DPO, arXiv 2309.16240), up to a constant that cancels in differences.
DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda x, alpha: x,
    "forward_kl": lambda x, alpha: 1 - (-x).clamp(max=EXPONENT_BOUND).exp(),
    "js_divergence": lambda x, alpha: math.log(2) + logsigmoid(x),
    "alpha_divergence": _alpha,
}


def _mapped(s: PairScores, o: PairOptions) -> tuple[Tensor, Tensor]:
    divergence = DIVERGENCES[o.f_divergence_type]
    alpha = o.f_alpha_divergence_coef
    return divergence(s.chosen, alpha), divergence(s.rejected, alpha)


def _margin(s: PairScores, o: PairOptions) -> Tensor:
    chosen, rejected = _mapped(s, o)
    return o.beta * (chosen - rejected)


def _norm_margin(s: PairScores, o: PairOptions) -> Tensor:
    chosen, rejected = _mapped(s, o)
    return chosen / s.chosen_lengths.clamp(min=1) - rejected / s.rejected_lengths.clamp(min=1)


def _smoothed(x: Tensor, o: PairOptions) -> Tensor:
    """Cross-entropy if labels are wrong with the probability `label_smoothing` (cDPO)."""
    return -(1 - o.label_smoothing) * logsigmoid(x) - o.label_smoothing * logsigmoid(-x)


def _exo_pair(s: PairScores, o: PairOptions) -> Tensor:
    x = _margin(s, o)
    e = o.label_smoothing
    term_chosen = x.sigmoid() * (logsigmoid(x) - math.log1p(-e))
    return term_chosen + (-x).sigmoid() * (logsigmoid(-x) - math.log(e))


def _robust(s: PairScores, o: PairOptions) -> Tensor:
    x = _margin(s, o)
    e = o.label_smoothing
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


def _required(partners: Tensor | None) -> Tensor:
    if partners is None:
        raise ValueError("aot losses need partners over the whole step: see aot_partners.")
    return partners


def _aot(s: PairScores, o: PairOptions) -> Tensor:
    return _smoothed(o.beta * (s.chosen - s.rejected - _required(s.chosen_partners)), o)


def _aot_unpaired(s: PairScores, o: PairOptions) -> Tensor:
    # Partners are constants, so the gradient of a difference is the sum over both sides; its value
    # is counted once.
    chosen_loss = _smoothed(o.beta * (s.chosen - _required(s.chosen_partners)), o)
    rejected_loss = _smoothed(o.beta * (_required(s.rejected_partners) - s.rejected), o)
    return chosen_loss + rejected_loss - rejected_loss.detach()


def _discopop(s: PairScores, o: PairOptions) -> Tensor:
    x = _margin(s, o)
    mix = (x / o.discopop_tau).sigmoid()
    return -logsigmoid(x) * (1 - mix) + (-x).clamp(max=EXPONENT_BOUND).exp() * mix


# Papers: sigmoid DPO 2305.18290 (smoothed: cDPO), hinge SLiC 2305.10425, ipo 2310.12036, exo_pair
# 2402.00856, nca_pair 2402.05369, robust 2403.00409, bco_pair 2404.04656, sppo_hard 2405.00675,
# aot 2406.05882, apo 2408.06266, discopop 2406.08414, sigmoid_norm Tulu 3 2411.15124.
# Each gives the loss of each pair (B,).
PAIR_LOSSES: dict[str, Callable[[PairScores, PairOptions], Tensor]] = {
    "sigmoid": lambda s, o: _smoothed(_margin(s, o), o),
    "hinge": lambda s, o: torch.relu(1 - _margin(s, o)),
    "ipo": lambda s, o: (_norm_margin(s, o) - 1 / (2 * o.beta)).square(),
    "exo_pair": _exo_pair,
    "nca_pair": lambda s, o: (
        -logsigmoid(o.beta * s.chosen)
        - 0.5 * (logsigmoid(-o.beta * s.chosen) + logsigmoid(-o.beta * s.rejected))
    ),
    "robust": _robust,
    "bco_pair": lambda s, o: -logsigmoid(o.beta * s.chosen) - logsigmoid(-o.beta * s.rejected),
    "sppo_hard": lambda s, o: (
        (s.chosen - 1 / (2 * o.beta)).square() + (s.rejected + 1 / (2 * o.beta)).square()
    ),
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": lambda s, o: (-o.beta * s.chosen).sigmoid() + (o.beta * s.rejected).sigmoid(),
    "apo_down": lambda s, o: (
        (o.beta * s.chosen).sigmoid() + (-o.beta * (s.chosen - s.rejected)).sigmoid()
    ),
    "discopop": _discopop,
    "sigmoid_norm": lambda s, o: -logsigmoid(o.beta * _norm_margin(s, o)),
}
AOT_LOSSES = ("aot", "aot_unpaired")  # losses that need partners
WITHOUT_DIVERGENCE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", *AOT_LOSSES)


def rank_partners(values: Tensor, candidates: Tensor) -> Tensor:
    """Return for each value (N,) the candidate (N,) of the same rank: 1-D optimal transport."""
    partners = torch.empty_like(candidates)
    partners[values.argsort(stable=True)] = candidates.sort().values
    return partners


def aot_partners(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """Return the partners (N, 2) of an aot loss for all pairs of an optimizer step.

    `policy` and `reference` are log-probabilities (N, 2) of chosen and rejected answers.
    """
    if name == "aot":
        ref_margins = reference[:, 0] - reference[:, 1]
        # The loss subtracts partners from log-ratios, which contain the pair's own ref_margin.
        partners = rank_partners(policy[:, 0] - policy[:, 1], ref_margins) - ref_margins
        return torch.stack([partners, 0 * partners], 1)
    chosen, rejected = (policy - reference).unbind(1)
    return torch.stack([rank_partners(chosen, rejected), rank_partners(rejected, chosen)], 1)


def shared_length_weights(
    lengths: Tensor, counterparts: Tensor, width: int, alpha: float
) -> Tensor:
    """Weights (B, C) of tokens: 1 up to the length of the pair's shorter answer, `alpha` beyond.

    `lengths` (B,) are those of the answers, `counterparts` (B,) those of the other answer of the
    pair; `width` is C (LD-DPO, arXiv 2409.06411).
    """
    shared = torch.minimum(lengths, counterparts)
    beyond = torch.arange(width, device=lengths.device) >= shared[:, None]
    return torch.where(beyond, alpha, 1.0)


def kto_loss(ratios: Tensor, desirable: Tensor, kl: Tensor | float, beta: float) -> Tensor:
    """Loss (B,) of answers with log-ratios (B,), desirable or not (B,) (KTO, arXiv 2402.01306).

    `kl` () is an estimate of the KL divergence over the whole optimizer step, without gradient.
    With 0 the loss is APO-zero for unpaired answers.
    """
    difference = beta * (ratios - kl)
    return torch.where(desirable, -difference, difference).sigmoid()


def ranking_loss(better: Tensor, worse: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Negative log-likelihood (B,) of a preference under Bradley-Terry, from scores (B,).

    `margin` is subtracted from the difference of the scores (arXiv 2307.09288).
    """
    return -logsigmoid(better - worse - margin)


def kl_partners(rows: Iterable[tuple[Hashable, int, T]]) -> Iterator[tuple[T, T]]:
    """Pair each row (answer, source, row) of KTO with a row of another answer and another source.

    `source` is the index of the example. The partner is the latest such row before, or else the
    first one after. Raises a ValueError if a row has no partner.
    """
    recent: dict[Hashable, dict[int, T]] = {}  # by answer and source
    waiting: dict[Hashable, list[tuple[int, T]]] = {}
    for answer, source, row in rows:
        for other_answer in waiting:
            if other_answer == answer:
                continue
            for waiting_source, waiting_row in waiting[other_answer]:
                if waiting_source != source:
                    yield waiting_row, row
            waiting[other_answer] = [x for x in waiting[other_answer] if x[0] == source]
        if (partner := _latest(recent, answer, source)) is None:
            waiting.setdefault(answer, []).append((source, row))
        else:
            yield row, partner
        _remember(recent, answer, source, row)
    unpaired = [source for source, _ in chain(*waiting.values())]
    if unpaired:
        raise ValueError(
            f"Row {min(unpaired)} has no partner: the KL estimate needs rows of other examples "
            "with other completions."
        )


def _remember(recent: dict[Hashable, dict[int, T]], answer: Hashable, source: int, row: T) -> None:
    """Make a row the latest; two sources per answer suffice, as one differs from any given one."""
    recent[answer] = dict([*recent.pop(answer, {}).items()][-2:]) | {source: row}
    if len(recent) > LOOKED_BACK:
        oldest = next(iter(recent))
        del recent[oldest]


def _latest(recent: dict[Hashable, dict[int, T]], answer: Hashable, source: int) -> T | None:
    for recent_answer, by_source in reversed(recent.items()):
        for recent_source, row in reversed(by_source.items()):
            if recent_answer != answer and recent_source != source:
                return row
    return None
