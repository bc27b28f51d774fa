"""Losses on pairs of answers, on answers with a label, and on scores of a reward model.

Shapes: B pairs or answers of a micro-batch. Every loss is one number for each pair or answer;
nothing is averaged here, so a trainer divides the sum by totals of a whole optimizer step. A log-
ratio is the log-probability of an answer under the policy minus that under the reference.
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
LOOKED_BACK = 64  # answers among which a partner is looked for
EXPONENT_BOUND = 40.0  # the square of exp of it is finite in float32


@dataclass(frozen=True)
class PairScores:
    """What losses read of B pairs: sums over the tokens of an answer, and their number."""

    chosen: Tensor  # (B,) log-ratio of the chosen answer
    rejected: Tensor  # (B,) log-ratio of the rejected answer
    chosen_lengths: Tensor  # (B,) tokens
    rejected_lengths: Tensor  # (B,) tokens
    # What aot losses compare each side with (B,), of all pairs of a step, see `rank_partners`.
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


# How a log-ratio enters a loss: the derivative of the divergence that holds the policy back
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
    """Cross-entropy when a label is wrong with the probability `label_smoothing` (cDPO)."""
    return -(1 - o.label_smoothing) * logsigmoid(x) - o.label_smoothing * logsigmoid(-x)


def _exo_pair(s: PairScores, o: PairOptions) -> Tensor:
    x, e = _margin(s, o), o.label_smoothing
    right = x.sigmoid() * (logsigmoid(x) - math.log1p(-e))
    return right + (-x).sigmoid() * (logsigmoid(-x) - math.log(e))


def _robust(s: PairScores, o: PairOptions) -> Tensor:
    x, e = _margin(s, o), o.label_smoothing
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


def _aot_unpaired(s: PairScores, o: PairOptions) -> Tensor:
    # Partners are constants, so each side brings the gradient of its own half of a difference;
    # the value is counted once.
    ours = _smoothed(o.beta * (s.chosen - torch.as_tensor(s.chosen_partners)), o)
    theirs = _smoothed(o.beta * (torch.as_tensor(s.rejected_partners) - s.rejected), o)
    return ours + theirs - theirs.detach()


def _discopop(s: PairScores, o: PairOptions) -> Tensor:
    x = _margin(s, o)
    share = (x / o.discopop_tau).sigmoid()
    return -logsigmoid(x) * (1 - share) + (-x).clamp(max=EXPONENT_BOUND).exp() * share


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
    "aot": lambda s, o: _smoothed(
        o.beta * (s.chosen - s.rejected - torch.as_tensor(s.chosen_partners)), o
    ),
    "aot_unpaired": _aot_unpaired,
    "apo_zero": lambda s, o: (-o.beta * s.chosen).sigmoid() + (o.beta * s.rejected).sigmoid(),
    "apo_down": lambda s, o: (
        (o.beta * s.chosen).sigmoid() + (-o.beta * (s.chosen - s.rejected)).sigmoid()
    ),
    "discopop": _discopop,
    "sigmoid_norm": lambda s, o: -logsigmoid(o.beta * _norm_margin(s, o)),
}
RANKED = ("aot", "aot_unpaired")  # these compare with partners
WITHOUT_DIVERGENCE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", *RANKED)


def rank_partners(values: Tensor, candidates: Tensor) -> Tensor:
    """For each value (N,) the candidate (N,) of the same rank: 1-D optimal transport."""
    partners = torch.empty_like(candidates)
    partners[values.argsort(stable=True)] = candidates.sort().values
    return partners


def aot_partners(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """What an aot loss compares log-ratios with (N, 2), from log-probabilities (N, 2) of a step."""
    if name == "aot":
        ref_margins = reference[:, 0] - reference[:, 1]
        # The margin of ratios has the pair's own margin of the reference taken off already.
        partners = rank_partners(policy[:, 0] - policy[:, 1], ref_margins) - ref_margins
        return torch.stack([partners, 0 * partners], 1)
    chosen, rejected = (policy - reference).unbind(1)
    return torch.stack([rank_partners(chosen, rejected), rank_partners(rejected, chosen)], 1)


def shared_length_weights(
    lengths: Tensor, counterparts: Tensor, width: int, alpha: float
) -> Tensor:
    """Weights (B, C) of tokens: 1 up to the shorter answer of a pair, `alpha` beyond.

    `lengths` (B,) are those of answers, `counterparts` of the other ones; `width` is C
    (LD-DPO, arXiv 2409.06411).
    """
    shared = torch.minimum(lengths, counterparts)
    beyond = torch.arange(width, device=lengths.device) >= shared[:, None]
    return torch.where(beyond, alpha, 1.0)


def kto_loss(ratios: Tensor, desirable: Tensor, kl: Tensor | float, beta: float) -> Tensor:
    """Loss (B,) of answers with log-ratios (B,), desirable or not (B,) (KTO, arXiv 2402.01306).

    `kl` () is an estimate of the KL divergence over a whole optimizer step, without gradient; 0
    makes it APO-zero for unpaired answers.
    """
    difference = beta * (ratios - kl)
    return torch.where(desirable, -difference, difference).sigmoid()


def ranking_loss(better: Tensor, worse: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Negative log-likelihood (B,) of a preference under Bradley-Terry, of scores (B,).

    `margin` says by how much the better one should lead (arXiv 2307.09288).
    """
    return -logsigmoid(better - worse - margin)


def kl_partners(rows: Iterable[tuple[Hashable, int, T]]) -> Iterator[tuple[T, T]]:
    """Pair rows (answer, source, row) of KTO, each with one of another answer to another example.

    That is the last one before, or else the first one after. Having none is a ValueError.
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
    if left := [source for source, _ in chain(*waiting.values())]:
        raise ValueError(
            f"Row {min(left)} has no partner: the KL estimate needs rows of other examples with "
            "other completions."
        )


def _remember(recent: dict[Hashable, dict[int, T]], answer: Hashable, source: int, row: T) -> None:
    """Make a row the latest one; of two sources of an answer, one is always another one."""
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
