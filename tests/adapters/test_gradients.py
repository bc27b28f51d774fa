"""One step of every kind of adapter is the step by definition, and moves nothing else."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kinds import (
    GROUP,
    KINDS,
    PROMPTS,
    Watch,
    distance,
    frozen,
    independent,
    rloo_gradient,
    same,
    trained,
    trainer_of,
)
from online_runs import completion_logps, rows_of, token_sum

from trl.trainer.grpo_trainer import GRPOTrainer

LAYOUTS = {
    "shared prompts, bounded head": {"shared_prefix": True, "logits_chunk_size": 400},
    "plain rows, all logits": {"shared_prefix": False, "logits_chunk_size": 0},
}
EXACT = 5e-6


def one_step(kind, folder, **changes):
    """Train one step: the trainer, what it started with, and the gradients it used."""
    trainer, watch = trainer_of(kind, folder, **changes), Watch()
    trainer.add_callback(watch)
    start, base = trained(trainer.model), frozen(trainer.model)
    trainer.train()
    assert same(frozen(trainer.model), base), "frozen weights have moved"
    assert not same(trained(trainer.model), start)
    return trainer, start, watch.gradients[0]


@pytest.mark.parametrize("name", KINDS)
def test_the_gradient_is_that_of_single_rows(tmp_path, name):
    kind = KINDS[name]
    reference = None
    for layout, options in LAYOUTS.items():
        trainer, start, gradient = one_step(kind, tmp_path, **options)
        if reference is None:
            reference = rloo_gradient(independent(kind, tmp_path, start))
        assert distance(gradient, reference) < kind.bound, layout
        assert trainer.scorer.check.enabled == options["shared_prefix"], layout


@pytest.mark.parametrize("name", ["lora", "4-bit"])
def test_the_gradient_of_grpo(tmp_path, name):
    """dapo: advantages in units of their group's deviation, a mean over all tokens."""
    kind = KINDS[name]
    _, start, gradient = one_step(kind, tmp_path, trainer_class=GRPOTrainer)
    model, rows = independent(kind, tmp_path, start), rows_of(PROMPTS, GROUP)
    rewards = torch.tensor(token_sum([ids for _, ids in rows])).view(-1, GROUP)
    centered = rewards - rewards.mean(1, keepdim=True)
    advantages = (centered / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    tokens = sum(len(ids) for _, ids in rows)
    for (prompt, completion), advantage in zip(rows, advantages, strict=True):
        logps = completion_logps(model, prompt, completion)
        (-advantage * logps.sum() / tokens).backward()
    assert distance(gradient, trained(model, lambda p: p.grad)) < EXACT


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["lora", "head", "target_parameters", "4-bit"])
def test_activations_that_are_recomputed(tmp_path, name, reentrant):
    kind = KINDS[name]
    options = {"use_reentrant": reentrant}
    _, start, gradient = one_step(
        kind, tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options
    )
    reference = rloo_gradient(independent(kind, tmp_path, start))
    assert distance(gradient, reference) < kind.bound


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_brought_adapter_with_recomputed_activations(tmp_path, reentrant):
    """Layers with nothing but frozen inputs pass gradients on to the factors in them."""
    kind = KINDS["lora"]
    torch.manual_seed(0)
    model = independent(kind, tmp_path, {})
    _, start, gradient = one_step(
        kind,
        tmp_path,
        model=model,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    reference = rloo_gradient(independent(kind, tmp_path, start))
    assert distance(gradient, reference) < EXACT


def test_what_the_caller_froze_stays_frozen(tmp_path):
    """Only second factors are trained; scoring under the reference does not change that."""
    kind = KINDS["lora"]
    model = independent(kind, tmp_path, {})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    trainer, start, _ = one_step(kind, tmp_path, model=model, beta=0.1)
    assert trainer.reference is not None
    assert all("lora_B" in name for name in start)
