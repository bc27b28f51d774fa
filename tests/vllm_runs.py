"""What runs with a vLLM engine wrote, and the reward that they learn by."""

import json

import torch


def completions(folder, mode="train"):
    lines = (folder / "completions" / f"{mode}.jsonl").read_text().splitlines()
    return [json.loads(line)["completion_ids"] for line in lines]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def share_of_digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def check_reward_rises(trainer_of, folder, kind):
    """Learn to write digits in 20 steps; returns the trainer."""
    settings = {"per_device_train_batch_size": 32, "num_generations": 8, "max_steps": 20}
    trainer = trainer_of(folder, kind, reward=share_of_digits, **settings)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.6, rewards
    return trainer


def check_seeds(trainer_of, folder):
    """The completions of a run depend on its seed, and on no state of the process."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(name) + seed)
        trainer_of(folder / name, seed=seed).train()
    assert completions(folder / "a") == completions(folder / "b")
    assert completions(folder / "a") != completions(folder / "c")
