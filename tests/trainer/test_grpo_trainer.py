"""Whole GRPO steps against a loop over single tokens, in double precision, from the papers."""

import json
import math
import statistics
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from online import PROMPTS, dataset, gradients, make_trainer, relative, rows_of, script, token_sum
from tiny import tiny_model
from torch.nn.utils import vector_to_parameters
from transformers import TrainerCallback

from trl.generation.base import cut_at_stop
from trl.trainer.grpo_config import LOSS_TYPES
from trl.trainer.grpo_trainer import CLIPPED, STATE_FILE, GRPOTrainer
from trl.types import Generations

ROWS = rows_of(PROMPTS[:2], 4)
CASES = [(kind, level) for kind in LOSS_TYPES for level in ("token", "sequence")]
CASES.remove(("vespo", "sequence"))  # its weight is one for a completion in any case
LONGEST = 8  # max_completion_length


# --- The slow side ---


def token_scores(model, prompt, completion):
    """Log-probabilities and entropies of one completion, from one unpadded forward."""
    logits = model(torch.tensor([prompt + completion])).logits[0]
    every = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return every[range(len(completion)), completion], -(every.exp() * every).sum(-1)


def credit(rewards, size=4, scale="group"):
    """Advantages; None stands for a row that could not be scored."""
    found = []
    present = [r for r in rewards if r is not None]
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        scored = [r for r in group if r is not None]
        spread = {
            "none": 1.0,
            "group": statistics.stdev(scored) + 1e-4,
            "batch": statistics.stdev(present) + 1e-4,
        }[scale]
        mean = statistics.fmean(scored)
        found += [0.0 if r is None else (r - mean) / spread for r in group]
    return found


ADVANTAGES = credit(token_sum([completion for _, completion in ROWS]))


@dataclass(frozen=True)
class Loop:
    """The loss of one micro-batch; the fields are the options of the configuration."""

    kind: str = "dapo"
    level: str = "token"
    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    corrected: bool = True
    coefficient: float = 0.0

    def objective(self, ratio, logp, advantage, phi):
        if self.kind == "cispo":
            return -min(ratio.item(), self.high) * advantage * logp
        if self.kind == "vespo":
            return -phi * advantage * logp
        if self.kind == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
        clipped = min(max(ratio.item(), 1 - self.low), 1 + self.high)
        plain = self.delta if self.delta is not None and ratio > self.delta else ratio
        return -min(plain * advantage, ratio.new_tensor(clipped) * advantage)

    def phi(self, differences, advantage):
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        w = math.exp(sum(differences.tolist()))
        return w**k * math.exp(decay * (1 - w))

    def loss(self, model, rows, advantages, *, old=None, reference=None, keep=None):
        tokens = sum(len(completion) for _, completion in rows)
        total, entropy = 0.0, 0.0
        for i, (prompt, completion) in enumerate(rows):
            length = len(completion)
            logps, entropies = token_scores(model, prompt, completion)
            with torch.no_grad():
                old_logps = logps if old is None else token_scores(old, prompt, completion)[0]
                old_logps = old_logps.detach().clone()
                if self.beta:
                    ref_logps = token_scores(reference, prompt, completion)[0]
            differences = logps - old_logps
            phi = self.phi(differences, advantages[i])
            denominator = {
                "grpo": len(rows) * length,
                "sapo": len(rows) * length,
                "dr_grpo": len(rows) * LONGEST,
                "luspo": len(rows),
            }.get(self.kind, tokens)
            for t in range(length):
                moved = differences[t] if self.level == "token" else differences.mean()
                ratio = moved.exp()
                loss = self.objective(ratio, logps[t], advantages[i], phi)
                if keep is not None and not keep[i][t]:
                    loss = 0.0
                if self.beta:
                    gap = ref_logps[t] - logps[t]
                    k3 = gap.exp() - gap - 1
                    loss = loss + self.beta * k3 * (ratio if self.corrected else 1.0)
                total = total + loss / denominator
            entropy = entropy + entropies.sum() / tokens
        return total - self.coefficient * entropy

    def gradient(self, model, rows=ROWS, advantages=ADVANTAGES, **others):
        model.zero_grad()
        self.loss(model, rows, advantages, **others).backward()
        return gradients(model)


def model_at(weights=None):
    """The tiny model in double precision, with its first weights or the given ones."""
    model = tiny_model().double()
    if weights is not None:
        vector_to_parameters(weights.double(), model.parameters())
    return model


# --- The fast side ---


class Recorder(TrainerCallback):
    """Keeps weights and gradient of every update; may move the policy after each of them."""

    def __init__(self, shift=False):
        self.weights, self.gradients, self.shift = [], [], shift

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.shift:
            shift_weights(model)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        flat = [p.detach().flatten() for p in model.parameters()]
        self.weights.append(torch.cat(flat).clone())
        self.gradients.append(gradients(model).clone())


def run(folder, move_reference=False, shift=False, **changes):
    """Train on scripted completions; return the recorder and the trainer."""
    recorder = Recorder(shift)
    trainer = make_trainer(folder, GRPOTrainer, callbacks=[recorder], **changes)
    if move_reference:
        shift_weights(trainer.reference.model)
    trainer.train()
    return recorder, trainer


def second_pass(folder, **changes):
    """Train twice on one round, with ratios on both sides of 1; return also the moved policy."""
    settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.001, "shift": True}
    recorder, trainer = run(folder, **(settings | changes))
    return recorder.gradients[1], model_at(recorder.weights[1]), trainer


def shift_weights(model, size=0.02):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def split(rows_a_micro_batch):
    return {
        "per_device_train_batch_size": rows_a_micro_batch,
        "gradient_accumulation_steps": 8 // rows_a_micro_batch,
    }


# --- Every objective ---


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_one_step_on_policy(tmp_path, kind, level):
    recorder, _ = run(tmp_path, loss_type=kind, importance_sampling_level=level)
    high = 1.2 if kind == "cispo" else 0.2
    expected = Loop(kind, level, high=high).gradient(model_at())
    assert relative(recorder.gradients[0], expected) < 5e-6


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_second_pass_off_policy(tmp_path, kind, level):
    high = {"epsilon_high": 1.07 if kind == "cispo" else 0.07}
    settings = {"loss_type": kind, "importance_sampling_level": level, "epsilon": 0.05} | high
    found, moved, trainer = second_pass(tmp_path, **settings)
    loop = Loop(kind, level, low=0.05, high=high["epsilon_high"])
    expected = loop.gradient(moved, old=model_at())
    assert relative(found, expected) < 5e-6
    assert relative(loop.gradient(moved), expected) > 1e-3, "old log-probabilities matter"
    if kind in CLIPPED:
        assert logged(trainer, "clip_ratio/low_mean")[0] == 0.0
        assert logged(trainer, "clip_ratio/low_mean")[1] > 0.0
        assert logged(trainer, "clip_ratio/high_mean")[1] > 0.0


@pytest.mark.parametrize("kind", CLIPPED)
def test_delta_bounds_the_unclipped_ratio(tmp_path, kind):
    found, moved, _ = second_pass(tmp_path, loss_type=kind, delta=1.02)
    expected = Loop(kind, delta=1.02).gradient(moved, old=model_at())
    assert relative(found, expected) < 5e-6
    assert relative(Loop(kind).gradient(moved, old=model_at()), expected) > 1e-3
