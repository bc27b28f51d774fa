"""Helpers for tests of whole training steps: a tiny model and scripted completions."""

import dataclasses
import json
import math

import torch
from datasets import Dataset
from scripted import ScriptedBackend
from slow_support import kept_mass
from tiny import ONE_UPDATE, tiny_model, tiny_tokenizer

from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

EOS = 1
PROMPTS = ["ab", "cde", "f", "ghij"]
# What `make_trainer` takes for each; a pair is a row of Online DPO.
TRAINERS = {
    "rloo": {"kind": RLOOTrainer},
    "online-dpo": {
        "kind": OnlineDPOTrainer,
        "num_generations": 2,
        "per_device_train_batch_size": 1,
    },
    "ppo": {"kind": PPOTrainer},
}


def dataset(prompts=PROMPTS, **columns) -> Dataset:
    return Dataset.from_dict({"prompt": list(prompts)} | columns)


def script(ids, place):
    """Completions of 1 to 5 tokens that depend on prompt and place; the last ends them."""
    length = (sum(ids) + 3 * place) % 4
    return [10 + (7 * place + 3 * i + ids[0]) % 60 for i in range(length)] + [EOS]


def token_sum(completion_ids, **kwargs):
    """A reward that differs between completions."""
    return [(sum(ids) % 13) / 3 for ids in completion_ids]


def config(folder, kind=RLOOConfig, **changes):
    settings = ONE_UPDATE | {
        "shuffle_dataset": False,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.0,
    }
    return kind(str(folder), **(settings | changes))


def make_trainer(folder, kind=RLOOTrainer, model=None, reward=token_sum, data=None, **changes):
    """A trainer over scripted completions. `script=None` samples from the model."""
    chosen = changes.pop("script", script)
    others = {
        name: changes.pop(name)
        for name in (
            *("callbacks", "eval_dataset", "optimizers", "peft_config", "quantization_config"),
            *("ref_model", "judge", "value_model", "environment_factory", "processing_class"),
        )
        if name in changes
    }
    trainer = kind(
        **({"processing_class": tiny_tokenizer()} | others),
        model=tiny_model() if model is None else model,
        reward_funcs=reward,
        args=config(folder, kind.config_class, **changes),
        train_dataset=dataset() if data is None else data,
    )
    if chosen is not None:
        trainer.backend = ScriptedBackend(
            chosen, first_row=lambda count: trainer.ranks.rank * count
        )
    return trainer


class ReportingBackend(ScriptedBackend):
    """Also reports with which log-probabilities its tokens would be drawn from a model.

    Args:
        off: called as `off(row, place)`; nats by which the one of a token is off.
    """

    def __init__(self, model, off=lambda row, place: 0.0, chosen=script):
        super().__init__(chosen)
        self.model, self.off = model, off

    def generate(self, prompts, sampling, group_size):
        found = super().generate(prompts, sampling, group_size)
        rows = zip(prompts.token_ids, found.completion_ids, strict=True)
        logps = [
            [logp + self.off(row, place) for place, logp in enumerate(self._drawn(*ids, sampling))]
            for row, ids in enumerate(rows)
        ]
        return dataclasses.replace(found, sampling_logps=logps)

    def _drawn(self, prompt, completion, sampling):
        filters = (sampling.top_p, sampling.top_k, sampling.min_p or 0.0)
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        for row, token in zip(logits / sampling.temperature, completion, strict=True):
            mass = kept_mass(row.tolist(), token, *filters)
            yield float(row.log_softmax(-1)[token]) - math.log(mass)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def completion_logps(model, prompt, completion, temperature=1.0) -> torch.Tensor:
    """Log-probabilities of one completion, from one unpadded forward."""
    logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
    every = logits.log_softmax(-1)
    places = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return every[places, torch.tensor(completion)]


def rows_of(prompts, group_size, chosen=script):
    """Prompt and completion ids of one round, as the scripted backend makes them."""
    tokenizer = tiny_tokenizer()
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [(ids, chosen(ids, place)) for ids in encoded for place in range(group_size)]


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def step_direction(trainer) -> torch.Tensor:
    """Train one step of plain SGD and return the gradient it used."""
    before = weights(trainer.model)
    trainer.train()
    return (before - weights(trainer.model)) / trainer.args.learning_rate


def trained(model):
    """The parameters that have a gradient, in order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def descend(model, gradient, rate):
    """A step of plain SGD."""
    start = 0
    with torch.no_grad():
        for parameter in trained(model):
            size = parameter.numel()
            parameter.sub_(rate * gradient[start : start + size].view_as(parameter))
            start += size


def left_alone_and_resumed(folder, make, **changes):
    """A run of three updates that saves after two, and one that was resumed there."""
    options = {"max_steps": 3, "optim": "adamw_torch", "script": None, "save_strategy": "steps"}
    options |= {"save_steps": 2, "ref_model": None, "learning_rate": 1e-2} | changes
    straight = make(folder / "straight", **options)
    straight.train()
    make(folder / "again", **(options | {"max_steps": 2})).train()
    resumed = make(folder / "again", **options)
    resumed.train(resume_from_checkpoint=True)
    return straight, resumed


def records(folder, mode="train"):
    """What the completion log of a run holds."""
    lines = (folder / "completions" / f"{mode}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def prompts_seen(folder):
    """The prompts of each optimizer step, in order, once for each group."""
    steps = {}
    for record in records(folder):
        steps.setdefault(record["step"], {})[record["group"]] = record["prompt"]
    return {step: list(groups.values()) for step, groups in steps.items()}
