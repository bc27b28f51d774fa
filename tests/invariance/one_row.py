"""The definition of the gradient: one row at a time, no padding, full logits, plain loops."""

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from cases import MOST_TOKENS, REFERENCE_SCALE, Loss, Row
from online_dpo_runs import pair_gradient
from online_runs import descend
from ppo_runs import Loop
from torch import Tensor, nn

Round = Sequence[Sequence[Row]]  # the groups of one generation
EPSILON = 0.2


@dataclass
class Known:
    """Log-probabilities (C,) of rows under policies that do not change."""

    old: dict[Row, Tensor] = field(default_factory=dict)
    reference: dict[Row, Tensor] = field(default_factory=dict)
    entropies: dict[Row, Tensor] = field(default_factory=dict)  # (C,) of the old policy


def gradient(model: nn.Module, loss: Loss, rounds: Sequence[Round]) -> Tensor:
    """Gradient of one update, over all parameters in a row.

    Args:
        model: its weights move if the loss has a second pass.
        loss: the objective.
        rounds: what the update trains on.
    """
    definitions = {"Online DPO": gradient_of_pairs, "PPO": gradient_of_tokens}
    defined = definitions.get(loss.trainer.method.name)
    if defined is not None:
        return defined(model, loss, rounds)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = {row for groups in rounds for group in groups for row in group}
    known = Known()
    if loss.option("beta"):
        known.reference = score_all(scaled(model, REFERENCE_SCALE), loss, rows)
    if loss.option("beta") or loss.second_pass:
        known.old = score_all(model, loss, rows)
    if loss.option("top_entropy_quantile"):
        known.entropies = entropies_of_all(model, loss, rows)
    accumulate(model, loss, rounds, known)
    if loss.second_pass:
        with torch.no_grad():
            for parameter in trained:
                parameter -= loss.learning_rate * parameter.grad
        accumulate(model, loss, rounds, known, moved=True)
    return torch.cat([p.grad.flatten().float() for p in trained])


def gradient_of_pairs(model: nn.Module, loss: Loss, rounds: Sequence[Round]) -> Tensor:
    """That of the mean over pairs."""
    models = model, scaled(model, REFERENCE_SCALE)
    rows = [row for groups in rounds for group in groups for row in group[: loss.size]]
    texts = [(list(row.prompt), list(row.completion)) for row in rows]
    return pair_gradient(models, texts, [row.reward for row in rows], **loss.options)


def gradient_of_tokens(model: nn.Module, loss: Loss, rounds: Sequence[Round]) -> Tensor:
    """That of PPO: the mean over rounds of means over tokens."""
    reference, found = scaled(model, REFERENCE_SCALE), []
    for groups in rounds:
        rows = [row for group in groups for row in group]
        texts = [(row.prompt, row.completion) for row in rows]
        loop = Loop(model, reference, texts, [row.reward for row in rows], **loss.options)
        credit = loop.credit()
        found.append(loop.gradient(credit))
        if loss.second_pass:
            descend(model, found[-1], loss.learning_rate)
            found[-1] = loop.gradient(credit)
    return torch.stack(found).mean(0)


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """A copy with all weights times a factor."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(factor)
    return found


@torch.no_grad()
def score_all(model: nn.Module, loss: Loss, rows: set[Row]) -> dict[Row, Tensor]:
    """Log-probabilities of rows, without gradient."""
    return {row: log_distributions(model, loss, row)[1] for row in rows}


@torch.no_grad()
def entropies_of_all(model: nn.Module, loss: Loss, rows: set[Row]) -> dict[Row, Tensor]:
    """Entropies (C,) of the next-token distributions of rows."""
    found = {row: log_distributions(model, loss, row)[0] for row in rows}
    return {row: -(every.exp() * every).sum(-1) for row, every in found.items()}


def log_distributions(model: nn.Module, loss: Loss, row: Row) -> tuple[Tensor, Tensor]:
    """By the model's own full logits: (C, V) all log-probabilities, (C,) those of the tokens."""
    ids = torch.tensor([row.prompt + row.completion])
    logits = model(input_ids=ids).logits[0].float() / loss.option("temperature", 1.0)
    first = len(row.prompt) - 1
    every = logits.log_softmax(-1)[first : first + len(row.completion)]
    chosen = [every[place, token] for place, token in enumerate(row.completion)]
    return every, torch.stack(chosen)


def accumulate(
    model: nn.Module, loss: Loss, rounds: Sequence[Round], known: Known, moved: bool = False
) -> None:
    """Set the gradients of `model` to those of the mean loss of the rounds."""
    model.zero_grad()
    for groups in rounds:
        rows = [row for group in groups for row in group]
        tokens = sum(len(row.completion) for row in rows)
        counted = tokens_that_count(loss, rows, known)
        for row, advantage in zip(rows, credit(loss, groups, known), strict=True):
            every, logps = log_distributions(model, loss, row)
            # Where nothing has moved the old policy is the current one.
            old = known.old[row] if moved else logps.detach()
            logps = (logps, old, known.reference.get(row))
            value = row_loss(loss, logps, advantage, len(rows), counted.get(row))
            if loss.option("loss_type") == "dapo":
                value = value / tokens
            if loss.option("entropy_coef"):
                value = value + loss.option("entropy_coef") * (every.exp() * every).sum() / tokens
            (value / len(rounds)).backward()


def tokens_that_count(loss: Loss, rows: Sequence[Row], known: Known) -> dict[Row, list[bool]]:
    """Tokens of high entropy, of all tokens of a round; empty if all count."""
    if not (share := loss.option("top_entropy_quantile")):
        return {}
    every = [entropy for row in rows for entropy in known.entropies[row].tolist()]
    threshold = np.quantile(every, 1 - share)
    assert min(abs(entropy - threshold) for entropy in every) > 1e-5, "rounding must not decide"
    return {row: (known.entropies[row] >= threshold).tolist() for row in rows}


def credit(loss: Loss, groups: Round, known: Known) -> list[float]:
    """Advantages of all rows of a round."""
    found = [advantage for group in groups for advantage in advantages(loss, group, known)]
    spread = None
    if loss.option("scale_rewards") == "batch":
        spread = statistics.stdev(row.reward for group in groups for row in group)
    if loss.option("normalize_advantages") or loss.option("multi_objective_aggregation"):
        spread = statistics.stdev(found)
    return found if spread is None else [value / (spread + 1e-4) for value in found]


def advantages(loss: Loss, group: Sequence[Row], known: Known) -> list[float]:
    """Credit of the rows of a group before it is scaled over the round, in numbers of Python."""
    rewards = [row.reward for row in group]
    if loss.family == "RLOO":
        if loss.option("beta"):
            for i, row in enumerate(group):
                divergence = (known.old[row] - known.reference[row]).sum()
                rewards[i] -= loss.option("beta") * float(divergence)
        totals = [sum(rewards) - reward for reward in rewards]
        return [r - t / (len(group) - 1) for r, t in zip(rewards, totals, strict=True)]
    mean = sum(rewards) / len(rewards)
    if loss.option("scale_rewards") in ("none", "batch"):
        return [reward - mean for reward in rewards]
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]


def row_loss(
    loss: Loss,
    logps: tuple[Tensor, Tensor, Tensor | None],
    advantage: float,
    rows: int,
    counted: list[bool] | None = None,
) -> Tensor:
    """What one completion adds to the loss of its round; for dapo, times the round's tokens.

    Args:
        loss: the objective.
        logps: (C,) under the current, the old and, for a KL penalty, the reference policy.
        advantage: the row's credit.
        rows: completions of the round.
        counted: tokens (C,) that have an objective, if not all.
    """
    current, old, reference = logps
    if is_far(loss, current, old, advantage):
        counted = [False] * len(current)
    if loss.family == "RLOO":
        return surrogate((current - old).sum().exp(), advantage) / rows
    if loss.option("importance_sampling_level") == "sequence":
        return surrogate((current - old).mean().exp(), advantage) / rows
    total = 0.0 * current.sum()
    for i in range(len(current)):
        ratio = (current[i] - old[i]).exp()
        if counted is None or counted[i]:
            total = total + surrogate(ratio, advantage)
        if reference is not None:
            further = reference[i] - current[i]
            total = total + loss.option("beta") * ratio * (further.exp() - further - 1)
    sizes = {"dapo": 1, "dr_grpo": rows * MOST_TOKENS, "grpo": rows * len(current)}
    return total / sizes[loss.option("loss_type")]


def is_far(loss: Loss, current: Tensor, old: Tensor, advantage: float) -> bool:
    """Whether a bad completion is dropped because it became much less likely."""
    if (threshold := loss.option("off_policy_mask_threshold")) is None or advantage >= 0:
        return False
    fall = float((old - current.detach()).mean())
    assert abs(fall - threshold) > 1e-5, "rounding must not decide"
    return fall > threshold


def surrogate(ratio: Tensor, advantage: float) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A)."""
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    return -torch.minimum(ratio * advantage, clipped * advantage)
