"""Names of arguments: unknown ones, and those of earlier releases, with what to write now.

A table of them stands beside what they were names of: old name -> new name, or why there is none.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...text import did_you_mean

MEANT = {"tokenizer": "processing_class", "max_seq_length": "max_length"}


@dataclass(frozen=True)
class Gone:
    """An old name that nothing replaces."""

    advice: str = ""  # what to do instead
    is_error: bool = False  # refused instead of ignored


def ignored(advice: str, *names: str) -> dict[str, str | Gone]:
    """Old names without effect."""
    return dict.fromkeys(names, Gone(advice))


def refused(advice: str, *names: str) -> dict[str, str | Gone]:
    """Old names whose effect is not to be lost silently."""
    return dict.fromkeys(names, Gone(advice, is_error=True))


# Options of all trainers that generate.
COMMON_OPTIONS: dict[str, str | Gone] = {
    "vllm_sleep_enabled": "vllm_enable_sleep_mode",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    **ignored("logits never exist at once, see logits_chunk_size", "use_liger_loss"),
}
# What the first trainers that generate had in common.
FIRST_OPTIONS: dict[str, str | Gone] = {
    **COMMON_OPTIONS,
    "cliprange": "epsilon",
    "kl_coef": "beta",
    "exp_name": "run_name",
    "total_episodes": "max_steps",
    "response_length": "max_completion_length",
    **ignored("prompts are tokenized batch by batch", "dataset_num_proc"),
    **refused("pass the model to reward_funcs", "reward_model_path"),
    **ignored(
        "scoring uses per_device_train_batch_size and per_device_eval_batch_size",
        "local_rollout_forward_batch_size",
    ),
    **ignored("use log_completions and logging_steps", "num_sample_generations"),
    **ignored("completions stop at every end token of the model", "stop_token", "stop_token_id"),
    **refused("pass the model to the trainer", "sft_model_path"),
    **refused(
        "use per_device_train_batch_size",
        *("local_batch_size", "micro_batch_size", "mini_batch_size", "local_mini_batch_size"),
    ),
    **refused("use generation_batch_size", "batch_size"),
    **refused("use max_steps", "num_total_batches"),
}
PREFERENCE_OPTIONS: dict[str, str | Gone] = {
    **ignored("rows are not padded", "label_pad_token_id", "padding_value"),
    **ignored("the model says what it is", "is_encoder_decoder"),
    **ignored("a ref_model that is passed is used", "force_use_ref_model"),
    **ignored("the head is found without it", "base_model_attribute_name"),
    **ignored("generate with the saved model", "generate_during_eval"),
    **ignored("the active adapter is trained", "model_adapter_name"),
    **refused(
        "the reference is a frozen copy of the adapter that a model brings", "ref_adapter_name"
    ),
    **refused("write them into the column 'tools' of the dataset", "tools"),
}


# Arguments of the first trainers that generate.
FIRST_ARGUMENTS: dict[str, str | Gone] = {
    "config": "args",
    "reward_model": "reward_funcs",
    "policy": "model",
    **ignored("", "data_collator"),
}


class _Construction(type):
    """What happens to keyword arguments before a constructor is called."""

    legacy_options: dict[str, Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known, table = _arguments_of(cls), cls.legacy_options
        for name in kwargs.keys() - known - table.keys():
            meant = MEANT.get(name)
            hint = f" Did you mean {meant}?" if meant in known else did_you_mean(name, known)
            raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint}")
        old = {name: kwargs.pop(name) for name in list(kwargs) if name in table}
        old = {name: value for name, value in old.items() if value is not None}
        given = dict(zip(known, args, strict=False)) | kwargs
        changes = _translate(cls.__name__, table, old, given)
        if "num_mini_batches" in old:
            changes["steps_per_generation"] *= kwargs.get("gradient_accumulation_steps", 1)
        episodes = changes.pop("max_steps") if "total_episodes" in old else None
        made = super().__call__(*args, **kwargs, **changes)
        if episodes is not None:  # completions that are generated and trained on
            plan = made.batch_plan
            rows = plan.micro_batch * plan.num_processes * plan.accumulation
            made.max_steps = math.ceil(episodes * plan.iterations / rows)
        return made


class Named(metaclass=_Construction):
    """Refuses keyword arguments that the constructor does not have, with what may be meant.

    Old names in `legacy_options` are accepted, with one warning for each construction that names
    the new ones. Giving an old name together with its new one, or a removed name, is an error.
    """

    legacy_options: ClassVar[dict[str, Any]] = {}


def _arguments_of(kind: type) -> dict[str, None]:
    """The names of the arguments of a constructor, and of those that it hands others on to."""
    found: dict[str, None] = {}
    for each in kind.__mro__:
        if "__init__" in vars(each):
            _, *parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
            others = [x for x in parameters if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
            found |= dict.fromkeys(x.name for x in parameters if x not in others)
            if not others:
                break
    return found


def _translate(
    owner: str, table: Mapping[str, str | Gone], old: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of old names by their new ones; the user is told once of all of them."""
    changes, words = {}, []
    for name, value in old.items():
        new = table[name]
        if isinstance(new, Gone):
            if new.is_error:
                raise TypeError(f"{owner} has no option {name!r} any more: {new.advice}.")
            words.append(f"{name} has no effect{f' ({new.advice})' if new.advice else ''}")
            continue
        if given.get(new) is not None:
            raise ValueError(f"{owner}: both {name} and {new} were given; {new} replaces it.")
        words.append(f"{name} is now {new}")
        changes[new] = value
    if words:
        warnings.warn(f"{owner}: {'; '.join(words)}.", FutureWarning, stacklevel=3)
    return changes
