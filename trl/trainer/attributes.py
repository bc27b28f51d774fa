"""How trainers are given arguments, and read: mistakes in names and values, names of attributes."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, TypeVar

from ..text import did_you_mean

if typing.TYPE_CHECKING:
    from transformers import GenerationConfig

    from ..types import Sampling

Trainer = TypeVar("Trainer", bound=type)

MEANT = {"tokenizer": "processing_class", "max_seq_length": "max_length"}
KINDS = {int: "an integer", float: "a number", bool: "True or False"}
KINDS |= {str: "text", list: "a list"}
MAPPING = "a dictionary, or a JSON object such as '{\"a\": 1}'"

# Names of Hugging Face TRL: options with these names, where the configuration has them.
OPTIONS = (
    *("beta", "num_generations", "num_iterations", "max_completion_length", "shuffle_dataset"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "pad_to_multiple_of"),
    *("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
    *("use_transformers_continuous_batching", "max_tool_calling_iterations"),
    *("mask_truncated_completions", "log_completions", "log_multimodal", "log_unique_prompts"),
    *("num_completions_to_print", "normalize_advantages", "reward_clip_range", "loss_type"),
    *("scale_rewards", "importance_sampling_level", "multi_objective_aggregation"),
    *("off_policy_mask_threshold", "top_entropy_quantile", "use_adaptive_entropy"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)
OTHERS: dict[str, Callable[[Any], Any]] = {
    "num_generations_eval": attrgetter("args.eval_group_size"),
    "epsilon_low": lambda found: found.args.clip_range[0],
    "epsilon_high": lambda found: found.args.clip_range[1],
    "entropy_coef": attrgetter("entropy.coefficient"),
    "generation_kwargs": lambda found: found.args.generation_kwargs or {},
    "chat_template_kwargs": lambda found: found.args.chat_template_kwargs or {},
    "eos_token_ids": lambda found: list(found.sampling.stop_ids),
    "generation_config": lambda found: _generation_config(found.args.use_vllm, found.sampling),
    "router_aux_loss_coef": attrgetter("router_coefficient"),
    "aux_loss_enabled": lambda found: found.router_coefficient != 0.0,
    "ref_model": lambda found: _own_model(found.reference),
    "reward_funcs": lambda found: [
        getattr(source, "function", None) or source.model for source in found.rewards.sources
    ],
    "reward_func_names": lambda found: [source.name for source in found.rewards.sources],
    "reward_weights": attrgetter("rewards.weights"),
    "reward_processing_classes": lambda found: [
        getattr(source, "tokenizer", None) for source in found.rewards.sources
    ],
    "tools": lambda found: list(found.agents.tools.by_name.values()) if found.agents.tools else [],
    "rollout_func": attrgetter("agents.rollout_func"),
}


def readable(kind: Trainer) -> Trainer:
    """Give a class of trainers read-only properties with these names."""
    for name in OPTIONS:
        setattr(kind, name, property(attrgetter(f"args.{name}")))
    for name, read in OTHERS.items():
        setattr(kind, name, property(read))
    return kind


def _own_model(reference: Any) -> Any:
    """The model of a reference; None if it is the policy's, with another adapter or none."""
    return None if reference is None or hasattr(reference, "adapter") else reference.model


def _generation_config(use_vllm: bool, sampling: Sampling) -> GenerationConfig | None:
    """How transformers would generate; None with vLLM."""
    if use_vllm:
        return None
    from transformers import GenerationConfig  # options are read without it

    same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        do_sample=bool(sampling.extra.get("do_sample", True)),
        eos_token_id=list(sampling.stop_ids),
        **{name: getattr(sampling, name) for name in same},
    )


class Named:
    """Refuses keyword arguments that the constructor does not have, with what may be meant."""

    legacy_options: ClassVar[dict[str, Any]] = {}  # which it has, too

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters
        takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in known.values())
        for name in () if takes_all else kwargs.keys() - known - cls.legacy_options.keys():
            meant = MEANT.get(name)
            hint = f" Did you mean {meant}?" if meant in known else did_you_mean(name, known)
            raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint}")
        return super().__new__(cls)


def changed(config: Any, names: Iterable[str]) -> str:
    """Those of some options of a dataclass that do not have their default value."""
    defaults = type(config).__dataclass_fields__
    return ", ".join(name for name in names if getattr(config, name) != defaults[name].default)


def kinds_of(config_class: Any) -> dict[str, list[Any]]:
    """The types that the options of a dataclass may have."""
    unions = {
        name: typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
        for name, hint in typing.get_type_hints(config_class).items()
    }
    return {name: [typing.get_origin(x) or x for x in found] for name, found in unions.items()}


def wrong_kind(value: Any, kinds: list[Any]) -> str | None:
    """Text would be true where it says false, and be taken apart into letters for a list."""
    if dict in kinds:
        no_mapping = isinstance(from_json(value), str | list | int | float)
        is_legal = not no_mapping or Path(str(value)).is_file()
        return None if is_legal else f"{MAPPING}."
    if isinstance(value, str):
        is_legal = str in kinds
    else:
        is_number = isinstance(value, (int, float)) and value is not False
        is_legal = not is_number or bool({int, float, bool} & {*kinds})
    words = [KINDS[kind] for kind in kinds if kind in KINDS]
    return None if is_legal or not words else f"{' or '.join(words)}."


def from_json(value: Any) -> Any:
    """What JSON text stands for; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value
