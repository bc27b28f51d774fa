"""An algorithm that is added in one file: its update against the formula, and a run that learns."""

import torch
from online_runs import (
    PROMPTS,
    completion_logps,
    gradients,
    make_trainer,
    relative,
    rows_of,
    step_direction,
    token_sum,
)
from tiny import tiny_model

from examples.reinforce_plus_plus import ReinforcePlusPlusTrainer

SETTINGS = {"num_generations": 1, "per_device_train_batch_size": 4}


def test_its_update_is_that_of_the_formula(tmp_path):
    """Credit of each token, one at a time; the ratio is 1 on-policy."""
    trainer = make_trainer(
        tmp_path, ReinforcePlusPlusTrainer, beta=0.3, ref_model=tiny_model(seed=1), **SETTINGS
    )
    ours = step_direction(trainer)
    model, reference = tiny_model(), tiny_model(seed=1)
    rows = rows_of(PROMPTS, 1)
    rewards = token_sum([completion for _, completion in rows])
    logps = [completion_logps(model, *row) for row in rows]
    with torch.no_grad():
        divergences = [
            ours - completion_logps(reference, *row) for ours, row in zip(logps, rows, strict=True)
        ]
    credits = [
        [reward - 0.3 * float(divergence[token:].sum()) for token in range(len(divergence))]
        for reward, divergence in zip(rewards, divergences, strict=True)
    ]
    flat = torch.tensor([credit for row in credits for credit in row])
    scaled = (flat - flat.mean()) / flat.std()
    loss = -(scaled * torch.cat(logps)).mean()
    loss.backward()
    assert relative(ours, gradients(model)) < 1e-4
    assert trainer.state.log_history[0]["kl"] != 0.0


def test_it_learns_what_is_rewarded(tmp_path):
    """The share of the letter that is rewarded rises."""

    def share(completion_ids, **kwargs):
        return [sum(20 <= token < 40 for token in ids) / max(len(ids), 1) for ids in completion_ids]

    trainer = make_trainer(
        tmp_path,
        ReinforcePlusPlusTrainer,
        reward=share,
        script=None,
        beta=0.0,
        max_steps=30,
        num_generations=4,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        optim="adamw_torch",
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0
