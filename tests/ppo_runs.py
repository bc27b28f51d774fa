"""Helpers for tests of PPO: scripted runs, and a round written out one token at a time."""

import torch
from online_runs import PROMPTS, make_trainer, rows_of, token_sum, trained
from reward_runs import classifier
from tiny import tiny_model

from trl.trainer.ppo_trainer import PPOTrainer

ONE_PASS = {"num_generations": 1, "per_device_train_batch_size": 4, "num_ppo_epochs": 1}


def make(folder, values=False, **changes):
    """A trainer whose values and reference are not trivial."""
    value_model = {"value_model": classifier()} if values else {}
    settings = {"beta": 0.2, "temperature": 0.9, "ref_model": tiny_model(seed=1)}
    trainer = make_trainer(folder, PPOTrainer, **(ONE_PASS | settings | value_model | changes))
    if not values:
        fill(trainer.model.value_model)
    return trainer


def fill(layer):
    """Values that are neither 0 nor alike."""
    torch.manual_seed(3)
    torch.nn.init.normal_(layer.weight, std=0.5)
    torch.nn.init.constant_(layer.bias, 0.3)


def tiny_loop(rewards=None, values=False, rows=None, **options):
    """The loop over the round of `make`."""
    model = tiny_model()
    model.value_model = classifier() if values else torch.nn.Linear(32, 1)
    if not values:
        fill(model.value_model)
    rows = rows or rows_of(PROMPTS, 1)
    rewards = rewards or token_sum([completion for _, completion in rows])
    options = {"beta": 0.2, "temperature": 0.9, "lam": 0.95, "vf_coef": 0.1} | options
    return Loop(model, tiny_model(seed=1), rows, rewards, **options)


class Loop:
    """One round, one token at a time, with plain forwards.

    Args:
        model: a policy with a `value_model`: a layer, or a classifier.
        reference: another policy, or None without a penalty.
        rows: prompt and completion of each, and which tokens the policy wrote, if not all.
        rewards: one for each.
        options: those of `PPOConfig`.
    """

    def __init__(self, model, reference, rows, rewards, **options):
        self.model, self.reference, self.rows, self.rewards = model, reference, rows, rewards
        self.o = {"beta": 0.05, "gamma": 1.0, "lam": 0.95, "kl_estimator": "k1"}
        self.o |= {"temperature": 1.0, "vf_coef": 0.1, "entropy_coef": 0.0}
        self.o |= {"whiten_rewards": False, "width": 0.2, "value_width": 0.2} | options

    def read(self, model, prompt, completion, mask=None):
        """Log-probabilities, entropies and values before each token that the policy wrote."""
        ids = torch.tensor([[*prompt, *completion]])
        out = model(input_ids=ids, output_hidden_states=True)
        own = torch.tensor([True] * len(completion) if mask is None else mask)
        at = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)[own]
        every = (out.logits[0].float() / self.o["temperature"]).log_softmax(-1)[at]
        logps = every[torch.arange(len(at)), torch.tensor(completion)[own]]
        entropies = -(every.exp() * every).sum(-1)
        found = getattr(model, "value_model", None)
        if found is None:
            return logps, entropies, None
        states = found.model(ids)[0][0] if hasattr(found, "score") else out.hidden_states[-1][0]
        layer = getattr(found, "score", found)
        return logps, entropies, layer(states)[at, 0]

    def credit(self):
        """Old log-probabilities, values, whitened advantages and returns of each row."""
        old = []
        for row, reward in zip(self.rows, self.rewards, strict=True):
            with torch.no_grad():
                logps, _, values = self.read(self.model, *row)
            rewards = self.penalties(row, logps)
            rewards[-1] += reward
            old.append([logps, values, rewards])
        if self.o["whiten_rewards"]:
            every = torch.cat([rewards for *_, rewards in old])
            scale = every.std()
            for row in old:
                row[2] = (row[2] - every.mean()) / scale + every.mean()
        found = []
        for logps, values, rewards in old:
            advantages = self.advantages(rewards, values)
            found.append((logps, values, advantages, advantages + values))
        every = torch.cat([advantages for _, _, advantages, _ in found])
        return [
            (logps, values, (advantages - every.mean()) / every.std(), returns)
            for logps, values, advantages, returns in found
        ]

    def penalties(self, row, logps):
        """What the tokens of a row cost."""
        if not self.o["beta"]:
            return torch.zeros_like(logps)
        with torch.no_grad():
            gap = logps - self.read(self.reference, *row)[0]
        kl = gap if self.o["kl_estimator"] == "k1" else (-gap).exp() - 1 + gap
        return -self.o["beta"] * kl

    def advantages(self, rewards, values):
        """The sum over later tokens, by definition."""
        found, steps = [], len(rewards)
        for t in range(steps):
            total = 0.0
            for k in range(t, steps):
                following = values[k + 1] if k + 1 < steps else 0.0
                surprise = rewards[k] + self.o["gamma"] * following - values[k]
                total += (self.o["gamma"] * self.o["lam"]) ** (k - t) * surprise
            found.append(total)
        return torch.tensor(found)

    def gradient(self, credit, rows=None):
        """The gradient of the mean over tokens."""
        chosen = range(len(self.rows)) if rows is None else rows
        tokens = sum(len(credit[i][0]) for i in chosen)
        self.model.zero_grad()
        for i in chosen:
            old, known, advantages, returns = credit[i]
            logps, entropies, values = self.read(self.model, *self.rows[i])
            ratio, width = (logps - old).exp(), self.o["width"]
            clipped = ratio.clamp(1 - width, 1 + width)
            policy = torch.max(-advantages * ratio, -advantages * clipped)
            near = known + (values - known).clamp(-self.o["value_width"], self.o["value_width"])
            off = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)
            loss = policy + self.o["vf_coef"] * off - self.o["entropy_coef"] * entropies
            (loss.sum() / tokens).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(self.model)]
        return torch.cat([grad.flatten() for grad in grads])
