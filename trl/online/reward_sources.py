"""Where rewards come from: functions, coroutine functions, sequence classifiers."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..distributed import undivided_models

# What of the policy's loading options also makes sense for a reward model.
SHARED_INIT_OPTIONS = ("dtype", "device_map", "trust_remote_code")


class RewardSource(Protocol):
    """One column of the reward table."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class SyncReward:
    """A plain callable."""

    name: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class AsyncReward:
    """A coroutine function, or an object whose `__call__` is one."""

    name: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class ModelReward:
    """A sequence classifier: its first logit on prompt and completion is the reward.

    Args:
        name (`str`): of the column.
        model (`nn.Module`): whole on every rank.
        tokenizer (`PreTrainedTokenizerBase`): its own.
        template_kwargs (`dict`): extra arguments of every chat-template call.
    """

    name: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @torch.inference_mode()
    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        template_kwargs: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[float]:
        """Score each completion with its prompt, strings or messages, in one forward pass.

        Args:
            prompts, completions: of each row.
            template_kwargs (*optional*): of each row; they win over those of all rows.
        """
        texts = [
            self._text(prompt, completion, self.template_kwargs | (options or {}))
            for prompt, completion, options in zip(
                prompts, completions, template_kwargs or [None] * len(prompts), strict=True
            )
        ]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self.model.parameters()).device
        logits = self.model(
            input_ids=inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
        ).logits
        return logits[:, 0].float().tolist()

    def _text(self, prompt: Any, completion: Any, template_kwargs: dict[str, Any]) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        messages = _conversation(prompt, completion)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)


def _conversation(
    prompt: list[dict[str, Any]], completion: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All messages; a reply that the prompt began and the completion goes on with is one."""
    if not (prompt and completion) or prompt[-1]["role"] != completion[0]["role"]:
        return [*prompt, *completion]
    begun = prompt[-1]["content"] + (completion[0]["content"] or "")
    return [*prompt[:-1], completion[0] | {"content": begun}, *completion[1:]]


def resolve_rewards(
    reward_funcs: Any,
    processing_classes: Any = None,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    template_kwargs: Any = None,
    trust_remote_code: bool = False,
) -> tuple[RewardSource, ...]:
    """Settle once what each reward is. Nothing given is modified.

    Args:
        reward_funcs: a callable, coroutine function, module, model name, or a list of these.
        processing_classes: tokenizers of reward models; one, or a list with None elsewhere.
        model_init_kwargs (`dict`, *optional*): loading options of the policy; a reward model
            given by name takes those of `SHARED_INIT_OPTIONS`.
        template_kwargs (`dict`, *optional*): extra arguments of reward models' chat templates.
        trust_remote_code (`bool`): whether code shipped with a reward model may run.

    Returns:
        `tuple[RewardSource, ...]`: with unique names.

    Raises:
        TypeError: for something that cannot give rewards.
        ValueError: if there is none, or the number of tokenizers differs.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if reward_funcs is None or not functions:
        raise ValueError("reward_funcs is empty: give at least one reward function or model.")
    tokenizers = _tokenizers(processing_classes, len(functions))
    options = {
        name: value
        for name, value in (model_init_kwargs or {}).items()
        if name in SHARED_INIT_OPTIONS
    }
    options.setdefault("trust_remote_code", trust_remote_code)
    names: list[str] = []
    sources: list[RewardSource] = []
    for place, (function, tokenizer) in enumerate(zip(functions, tokenizers, strict=True)):
        names.append(_unique(_name(function, place), names))
        source = _source(names[-1], function, tokenizer, options)
        if isinstance(source, ModelReward):
            source = replace(source, template_kwargs=template_kwargs or {})
        sources.append(source)
    return tuple(sources)


def _tokenizers(given: Any, count: int) -> list[Any]:
    if given is None:
        return [None] * count
    tokenizers = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(tokenizers) != count:
        raise ValueError(
            f"reward_processing_classes has {len(tokenizers)} entries for {count} reward "
            "functions; give one for each, None for those that are no models."
        )
    return tokenizers


def _name(function: Any, place: int) -> str:
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    if isinstance(function, nn.Module):
        config = getattr(function, "config", None)
        path = getattr(config, "_name_or_path", "") or type(function).__name__
        return path.rstrip("/").split("/")[-1]
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        raise TypeError(
            f"reward_funcs[{place}] is a {type(function).__name__}: it must be callable, a model, "
            "or the name of one."
        )
    return getattr(function, "__name__", type(function).__name__)


def _unique(name: str, taken: list[str]) -> str:
    if name not in taken:
        return name
    return next(f"{name}_{i}" for i in range(2, len(taken) + 3) if f"{name}_{i}" not in taken)


def _source(name: str, function: Any, tokenizer: Any, options: dict[str, Any]) -> RewardSource:
    if isinstance(function, str):
        with undivided_models():
            model = AutoModelForSequenceClassification.from_pretrained(
                function, num_labels=1, **options
            )
        tokenizer = _tokenizer_for(name, tokenizer, function, options)
        return _model_source(name, model, tokenizer)
    if isinstance(function, nn.Module):
        path = function.config._name_or_path if isinstance(function, PreTrainedModel) else ""
        return _model_source(name, function, _tokenizer_for(name, tokenizer, path, options))
    if _is_coroutine_function(function):
        return AsyncReward(name, function)
    return SyncReward(name, function)


def _tokenizer_for(name: str, given: Any, path: str, options: dict[str, Any]) -> Any:
    if given is not None:
        return given
    if not path:
        raise ValueError(
            f"The reward model {name!r} does not say where it was loaded from: pass its "
            "tokenizer in reward_processing_classes."
        )
    return AutoTokenizer.from_pretrained(path, trust_remote_code=options["trust_remote_code"])


def _model_source(name: str, model: nn.Module, tokenizer: Any) -> ModelReward:
    if tokenizer.pad_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    if isinstance(model, PreTrainedModel):
        model.config.pad_token_id = tokenizer.pad_token_id
    return ModelReward(name, model.eval(), tokenizer)


def _is_coroutine_function(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
