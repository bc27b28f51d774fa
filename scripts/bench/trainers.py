"""Build each trainer for the same work, through its public interface only."""

from __future__ import annotations

import dataclasses
import importlib
import json
import tempfile
from typing import TYPE_CHECKING, Any

import synthetic
import torch
from datasets import Dataset
from environments import BENCH
from runs import GROUPS
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

import trl

if TYPE_CHECKING:
    from meter import Meter
    from runs import Work

TRUNCATED_TO = 1024  # tokens, in the string-level proposal


class StepMarks(TrainerCallback):
    """Records the meter's totals at the end of every optimizer step."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._marks: list[dict[str, dict[str, float]]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the totals."""
        self._marks.append(self._meter.totals())

    def each(self) -> list[dict[str, dict[str, float]]]:
        """Return seconds, processor seconds, tokens and forward passes of each step, by phase."""
        befores = [{name: {} for name in mark} for mark in self._marks[:1]] + self._marks
        return [
            {name: _difference(after[name], before[name]) for name in after}
            for before, after in zip(befores, self._marks, strict=False)
        ]


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {key: round(value - before.get(key, 0.0), 4) for key, value in after.items()}


def reward(completions: Any, **_: Any) -> list[float]:
    """Give each completion a different reward, so that every row has an advantage."""
    return [float(i) for i in range(len(completions))]


def level_reward(completions: Any, **_: Any) -> list[float]:
    """Only the first two completions differ from the mean, so only they have an advantage."""
    return [0.0, 1.0] + [0.5] * (len(completions) - 2)


def build(work: Work, meter: Meter) -> tuple[Any, dict[str, Any]]:
    """Build the trainer for a work.

    Returns:
        The trainer, and the options of the work that its configuration knows.
    """
    if work.trainer == "this":
        from trl.generation.transformers.backend import TransformersBackend

        meter.watch_generation(TransformersBackend)
    if work.gpu_path:
        import gpu_path

        gpu_path.install()
    positions = work.prompt + work.completion + 8
    name = f"{work.trainer}-{work.shape}-{work.vocabulary}-{positions}"
    path = synthetic.save(BENCH / "models" / name, work.shape, work.vocabulary, positions)
    count = work.steps * work.completions // group_size(work)
    groups = synthetic.prompts(count, work.prompt, work.vocabulary, work.ragged)
    make = grouped
    if work.trainer == "trl-0.20.0":
        make = token_level
    elif work.trainer != "this" and work.algorithm == "PPO":
        make = with_four_models
    return make(work, str(path), groups)


def group_size(work: Work) -> int:
    """Return the completions per prompt."""
    return GROUPS.get(work.algorithm, work.completions)


def shared_options(work: Work) -> dict[str, Any]:
    """Return options for every trainer. Options that a release lacks are removed later."""
    rows = work.micro_batch or work.completions
    return {
        "output_dir": tempfile.mkdtemp(prefix="bench-"),
        "per_device_train_batch_size": rows // 2 if work.algorithm == "OnlineDPO" else rows,
        "gradient_accumulation_steps": work.completions // rows,
        "learning_rate": 1e-6,
        "bf16": True,
        "use_cpu": work.device == "cpu",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "temperature": 1.0,
        "seed": 0,
    }


def known(config_class: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that a configuration has."""
    names = {part.name for part in dataclasses.fields(config_class)}
    return {name: value for name, value in options.items() if name in names}


def grouped(work: Work, path: str, groups: list[str]) -> tuple[Any, dict[str, Any]]:
    """Build a trainer that forms groups itself: trl 0.22 and later, and this project."""
    home: Any = trl
    if work.algorithm == "OnlineDPO" and work.trainer != "this":
        home = importlib.import_module("trl.experimental.online_dpo")
    config_class = getattr(home, f"{work.algorithm}Config")
    chosen = known(config_class, json.loads(work.options))
    options = shared_options(work) | {
        "max_steps": work.steps,
        "num_generations": group_size(work),
        "num_ppo_epochs": 1,
        "max_prompt_length": None,  # the default of releases that have it cuts prompts at 512
        "max_completion_length": work.completion,
        "beta": work.beta,
        "shuffle_dataset": False,
    }
    if work.trainer == "this":
        options |= {"reward_dry_run": False}
    elif work.algorithm == "OnlineDPO":  # of which RLOO says neither
        options |= {"max_new_tokens": work.completion, "max_length": work.prompt + work.completion}
    arguments: dict[str, Any] = {"reward_funcs": level_reward if work.level else reward}
    if work.algorithm == "PPO":
        arguments = {"reward_funcs": classifier(path), "value_model": classifier(path)}
    if work.lora:
        from peft import LoraConfig

        arguments |= {"peft_config": LoraConfig(r=16, target_modules="all-linear")}
    trainer = getattr(home, f"{work.algorithm}Trainer")(
        model=path,
        args=config_class(**known(config_class, options | chosen)),
        train_dataset=Dataset.from_dict({"prompt": groups}),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        **arguments,
    )
    return trainer, chosen


def classifier(path: str) -> Any:
    """Load the model in a folder as a sequence classifier with one label."""
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)


def episode_options(work: Work) -> dict[str, Any]:
    """Return options of the older trainers, which count episodes."""
    return shared_options(work) | {
        "total_episodes": work.completions * work.steps,
        "num_ppo_epochs": 1,  # one optimizer step for each rollout, as the others
        "num_sample_generations": 0,
        "response_length": work.completion,
        "kl_coef": work.beta,
    }


def with_four_models(work: Work, path: str, groups: list[str]) -> tuple[Any, dict[str, Any]]:
    """Build PPO of trl 0.22, with policy, reference, reward and value models."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))
    chosen = known(trl.PPOConfig, json.loads(work.options))
    data = Dataset.from_dict({"input_ids": tokenizer(groups).input_ids})
    trainer = trl.PPOTrainer(
        args=trl.PPOConfig(**known(trl.PPOConfig, episode_options(work) | chosen)),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=classifier(path),
        value_model=classifier(path),
        train_dataset=data,
        eval_dataset=data,
    )
    return trainer, chosen


def token_level(work: Work, path: str, groups: list[str]) -> tuple[Any, dict[str, Any]]:
    """Build the trainer of trl 0.20, which takes token ids and repeats them."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))
    chosen = known(trl.RLOOConfig, json.loads(work.options))
    options = episode_options(work) | {"rloo_k": work.completions}
    data = Dataset.from_dict({"input_ids": tokenizer(groups).input_ids})
    collators = {
        "tokens": None,
        "strings": RepeatedStrings(tokenizer, work.completions, None),
        "strings-1024": RepeatedStrings(tokenizer, work.completions, TRUNCATED_TO),
    }
    trainer = trl.RLOOTrainer(
        config=trl.RLOOConfig(**known(trl.RLOOConfig, options | chosen)),
        processing_class=tokenizer,
        policy=policy,
        ref_policy=reference,
        reward_model=reward,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collators[work.prompts],
    )
    return trainer, chosen


class RepeatedStrings:
    """Repeats prompts as the proposal does: decode, repeat the strings, tokenize them again.

    Args:
        tokenizer: of the policy.
        times (`int`): completions of a prompt.
        longest (`int`, *optional*): where prompts are cut; the proposal cuts at 1024 tokens.
    """

    def __init__(self, tokenizer: Any, times: int, longest: int | None):
        self._tokenizer = tokenizer
        self._times = times
        self._longest = longest

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch that holds every prompt `times` times."""
        texts = self._tokenizer.batch_decode([row["input_ids"] for row in rows])
        cut = {"truncation": True, "max_length": self._longest} if self._longest else {}
        encoded = self._tokenizer(texts * self._times, padding=True, return_tensors="pt", **cut)
        return {"input_ids": encoded.input_ids.as_subclass(AlreadyRepeated)}


class AlreadyRepeated(torch.Tensor):
    """Token ids that are already repeated."""

    def repeat(self, *_: int) -> torch.Tensor:
        """Return the ids as they are."""
        return self.as_subclass(torch.Tensor)
