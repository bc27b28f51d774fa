"""Helpers for tests of Online DPO: scripted runs, and a step written out one pair at a time."""

import torch
from online_runs import completion_logps, gradients, make_trainer
from tiny import tiny_model

from trl.trainer.online_dpo_trainer import OnlineDPOTrainer

TEMPERATURE = 0.9
PAIRS = {"per_device_train_batch_size": 4, "num_generations": 2, "beta": 0.3}


def make(folder, **changes):
    """A trainer over four scripted pairs whose reference is not the policy."""
    changes = {"ref_model": tiny_model(seed=1)} | PAIRS | changes
    return make_trainer(folder, OnlineDPOTrainer, **changes)


def paper_gradient(rows, rewards, beta=0.3, loss_type="sigmoid"):
    """That of `make`."""
    return pair_gradient(
        (tiny_model(), tiny_model(seed=1)), rows, rewards, beta, loss_type, TEMPERATURE
    )


def pair_gradient(models, rows, rewards, beta, loss_type="sigmoid", temperature=1.0):
    """One pair at a time (arXiv 2402.04792; ipo: 2310.12036, of whole completions).

    Args:
        models: the policy, whose gradient it is, and the reference.
        rows: prompt and completion; those of a pair are neighbors.
        rewards: None for what could not be scored.
    """
    model, reference = models
    model.zero_grad()
    for place in range(0, len(rows), 2):
        first, second = rewards[place : place + 2]
        if first is None or second is None:
            continue
        ratios = []
        for row in rows[place : place + 2]:
            with torch.no_grad():
                theirs = completion_logps(reference, *row, temperature)
            ratios.append((completion_logps(model, *row, temperature) - theirs).sum())
        difference = ratios[0] - ratios[1] if first >= second else ratios[1] - ratios[0]
        if loss_type == "sigmoid":
            loss = -(beta * difference).sigmoid().log()
        else:
            loss = (difference - 1 / (2 * beta)) ** 2
        (loss / (len(rows) / 2)).backward()
    return gradients(model)
