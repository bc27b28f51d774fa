"""The definition of the gradient: one row at a time, no padding, full logits, plain loops."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
        credit = [advantage for group in groups for advantage in advantages(loss, group, known)]
        for row, advantage in zip(rows, credit, strict=True):
            every, logps = log_distributions(model, loss, row)
            # Where nothing has moved the old policy is the current one.
            old = known.old[row] if moved else logps.detach()
            value = row_loss(loss, (logps, old, known.reference.get(row)), advantage, len(rows))
            if loss.option("loss_type") == "dapo":
                value = value / tokens
            if loss.option("entropy_coef"):
                value = value + loss.option("entropy_coef") * (every.exp() * every).sum() / tokens
            (value / len(rounds)).backward()


def advantages(loss: Loss, group: Sequence[Row], known: Known) -> list[float]:
    """Credit of the rows of a group, in numbers of Python."""
    rewards = [row.reward for row in group]
    if loss.family == "RLOO":
        if loss.option("beta"):
            for i, row in enumerate(group):
                divergence = (known.old[row] - known.reference[row]).sum()
                rewards[i] -= loss.option("beta") * float(divergence)
        totals = [sum(rewards) - reward for reward in rewards]
        return [r - t / (len(group) - 1) for r, t in zip(rewards, totals, strict=True)]
    mean = sum(rewards) / len(rewards)
    if loss.option("scale_rewards") == "none":
        return [reward - mean for reward in rewards]
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]


def row_loss(
    loss: Loss, logps: tuple[Tensor, Tensor, Tensor | None], advantage: float, rows: int
) -> Tensor:
    """What one completion adds to the loss of its round; for dapo, times the round's tokens.

    Args:
        loss: the objective.
        logps: (C,) under the current, the old and, for a KL penalty, the reference policy.
        advantage: the row's credit.
        rows: completions of the round.
    """
    current, old, reference = logps
    if loss.family == "RLOO":
        return surrogate((current - old).sum().exp(), advantage) / rows
    if loss.option("importance_sampling_level") == "sequence":
        return surrogate((current - old).mean().exp(), advantage) / rows
    total = current.new_zeros(())
    for i in range(len(current)):
        ratio = (current[i] - old[i]).exp()
        total = total + surrogate(ratio, advantage)
        if reference is not None:
            further = reference[i] - current[i]
            total = total + loss.option("beta") * ratio * (further.exp() - further - 1)
    sizes = {"dapo": 1, "dr_grpo": rows * MOST_TOKENS, "grpo": rows * len(current)}
    return total / sizes[loss.option("loss_type")]


def surrogate(ratio: Tensor, advantage: float) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A)."""
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    return -torch.minimum(ratio * advantage, clipped * advantage)
