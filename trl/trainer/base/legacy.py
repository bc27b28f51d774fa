"""Names of earlier releases: one table, accepted with one warning that says what to write now."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LegacyOption:
    """What became of an old option."""

    new: str | None  # the option that replaces it, if one does
    advice: str = ""  # what to do instead, when nothing replaces it
    removed: bool = False  # refused instead of ignored


COMMON_OPTIONS: dict[str, LegacyOption] = {
    "vllm_sleep_enabled": LegacyOption("vllm_enable_sleep_mode"),
    "vllm_guided_decoding_regex": LegacyOption("vllm_structured_outputs_regex"),
    "wandb_log_unique_prompts": LegacyOption("log_unique_prompts"),
    "use_liger_loss": LegacyOption(None, "logits never exist at once, see logits_chunk_size"),
}
# What the first trainers that generate had in common.
FIRST_OPTIONS: dict[str, LegacyOption] = COMMON_OPTIONS | {
    "cliprange": LegacyOption("epsilon"),
    "kl_coef": LegacyOption("beta"),
    "exp_name": LegacyOption("run_name"),
    "total_episodes": LegacyOption("max_steps"),
    "response_length": LegacyOption("max_completion_length"),
    "dataset_num_proc": LegacyOption(None, "prompts are tokenized batch by batch"),
    "local_rollout_forward_batch_size": LegacyOption(
        None, "scoring uses per_device_train_batch_size and per_device_eval_batch_size"
    ),
    "num_sample_generations": LegacyOption(None, "use log_completions and logging_steps"),
    "stop_token": LegacyOption(None, "completions stop at every end token of the model"),
    "stop_token_id": LegacyOption(None, "completions stop at every end token of the model"),
    "reward_model_path": LegacyOption(None, "pass the model to reward_funcs", removed=True),
    "sft_model_path": LegacyOption(None, "pass the model to the trainer", removed=True),
    "local_batch_size": LegacyOption(None, "use per_device_train_batch_size", removed=True),
    "micro_batch_size": LegacyOption(None, "use per_device_train_batch_size", removed=True),
    "mini_batch_size": LegacyOption(None, "use per_device_train_batch_size", removed=True),
    "local_mini_batch_size": LegacyOption(None, "use per_device_train_batch_size", removed=True),
    "batch_size": LegacyOption(None, "use generation_batch_size", removed=True),
    "num_total_batches": LegacyOption(None, "use max_steps", removed=True),
}
RLOO_OPTIONS: dict[str, LegacyOption] = FIRST_OPTIONS | {
    "rloo_k": LegacyOption("num_generations"),
    "normalize_reward": LegacyOption("normalize_advantages"),
    "num_ppo_epochs": LegacyOption("num_iterations"),
    "num_mini_batches": LegacyOption("steps_per_generation"),
    "token_level_kl": LegacyOption(None, "the KL penalty is the sum over a completion's tokens"),
    "missing_eos_penalty": LegacyOption(None, "write a reward function of completion_ids"),
    "whiten_rewards": LegacyOption(None, "use normalize_advantages", removed=True),
    "normalize_advantage": LegacyOption(None, "use normalize_advantages", removed=True),
}
_ADAPTERS = "the adapter that is trained is the active one, and its base model the reference"
PPO_OPTIONS: dict[str, LegacyOption] = FIRST_OPTIONS | {
    "model_adapter_name": LegacyOption(None, _ADAPTERS),
    "ref_adapter_name": LegacyOption(None, _ADAPTERS),
}
PREFERENCE_OPTIONS: dict[str, LegacyOption] = {
    "label_pad_token_id": LegacyOption(None, "rows are not padded"),
    "padding_value": LegacyOption(None, "rows are not padded"),
    "is_encoder_decoder": LegacyOption(None, "the model says what it is"),
    "force_use_ref_model": LegacyOption(None, "a ref_model that is passed is used"),
    "base_model_attribute_name": LegacyOption(None, "the head is found without it"),
    "generate_during_eval": LegacyOption(None, "generate with the saved model"),
    "model_adapter_name": LegacyOption(None, "the active adapter is trained"),
    "ref_adapter_name": LegacyOption(
        None, "the reference is a frozen copy of the adapter that a model brings", removed=True
    ),
    "tools": LegacyOption(None, "write them into the column 'tools' of the dataset", removed=True),
}
ONLINE_DPO_OPTIONS: dict[str, LegacyOption] = COMMON_OPTIONS | {
    "max_new_tokens": LegacyOption("max_completion_length"),
    "gpu_memory_utilization": LegacyOption("vllm_gpu_memory_utilization"),
    "max_length": LegacyOption(None, "see max_prompt_length and long_prompts"),
    "dataset_num_proc": FIRST_OPTIONS["dataset_num_proc"],
    "reward_model_path": FIRST_OPTIONS["reward_model_path"],
    "judge": LegacyOption(None, "pass the judge to the trainer", removed=True),
}


def legacy_names(table: Mapping[str, LegacyOption]) -> dict[str, str | None]:
    """Old name -> new name, or None where nothing replaces it (for the command line)."""
    return {name: entry.new for name, entry in table.items()}


def accepts_legacy_options(table: Mapping[str, LegacyOption]) -> Callable[[type], type]:
    """Make a configuration class accept the old option names of `table` as keyword arguments.

    The class warns once for each construction, naming the new keys. Giving an old name together
    with its new one, or a removed name, is an error.
    """

    def decorate(cls: type) -> type:
        original = cls.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            old = {name: kwargs.pop(name) for name in list(kwargs) if name in table}
            old = {name: value for name, value in old.items() if value is not None}
            changes = _translate(cls.__name__, table, old, kwargs)
            if "num_mini_batches" in old:
                changes["steps_per_generation"] *= kwargs.get("gradient_accumulation_steps", 1)
            episodes = changes.pop("max_steps") if "total_episodes" in old else None
            original(self, *args, **kwargs, **changes)
            if episodes is not None:
                self.max_steps = _steps_for_episodes(self, episodes)

        cls.__init__ = __init__
        return cls

    return decorate


def _translate(
    owner: str, table: Mapping[str, LegacyOption], old: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of old names by their new ones; the user is told once of all of them."""
    changes, words = {}, []
    for name, value in old.items():
        new, advice = table[name].new, table[name].advice
        if table[name].removed:
            raise TypeError(f"{owner} has no option {name!r} any more: {advice}.")
        if new is None:
            words.append(f"{name} has no effect{f' ({advice})' if advice else ''}")
            continue
        if given.get(new) is not None:
            raise ValueError(f"{owner}: both {name} and {new} were given; {new} replaces it.")
        words.append(f"{name} is now {new}")
        changes[new] = value
    if words:
        warnings.warn(f"{owner}: {'; '.join(words)}.", FutureWarning, stacklevel=4)
    return changes


def _steps_for_episodes(config: Any, episodes: int) -> int:
    """Optimizer steps in which `episodes` completions are generated and trained on."""
    plan = config.batch_plan
    rows = plan.micro_batch * plan.num_processes * plan.accumulation
    return math.ceil(episodes * plan.iterations / rows)


RLOO_ARGUMENTS: dict[str, str | None] = {
    "config": "args",
    "reward_model": "reward_funcs",
    "policy": "model",
    "ref_policy": None,
    "data_collator": None,
}

PPO_ARGUMENTS: dict[str, str | None] = RLOO_ARGUMENTS | {"ref_policy": "ref_model"}
ONLINE_DPO_ARGUMENTS: dict[str, str | None] = {
    "reward_model": "reward_funcs",
    "reward_processing_class": "reward_processing_classes",
    "data_collator": None,
    "compute_metrics": None,
    "preprocess_logits_for_metrics": None,
}


def accepts_legacy_arguments(renamed: Mapping[str, str | None]) -> Callable[[type], type]:
    """Make a trainer accept the keyword arguments of its predecessor, with one warning.

    Giving an argument under both names is an error. A dataset tokenized beforehand (`input_ids`
    but no `prompt`) is decoded into prompts with the processing class.

    Args:
        renamed: old name -> new name, or None if the argument is ignored.
    """

    table = {name: LegacyOption(new) for name, new in renamed.items()}

    def decorate(cls: type) -> type:
        original = cls.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            old = {name: kwargs.pop(name) for name in list(kwargs) if name in renamed}
            given = signature.bind_partial(self, *args, **kwargs).arguments
            kwargs.update(_translate(cls.__name__, table, old, given))
            for name in ("train_dataset", "eval_dataset"):
                if _is_tokenized(kwargs.get(name)):
                    kwargs[name] = _decode(cls.__name__, kwargs[name], kwargs)
            original(self, *args, **kwargs)

        cls.__init__ = __init__
        return cls

    return decorate


def _is_tokenized(dataset: Any) -> bool:
    columns = getattr(dataset, "column_names", None)
    return isinstance(columns, list) and "input_ids" in columns and "prompt" not in columns


def _decode(owner: str, dataset: Any, kwargs: Mapping[str, Any]) -> Any:
    tokenizer = kwargs.get("processing_class")
    if tokenizer is None:
        raise ValueError(
            f"{owner}: the dataset has input_ids but no prompt; pass the tokenizer as "
            "processing_class, or a dataset with a 'prompt' column."
        )
    warnings.warn(
        f"{owner}: a dataset with input_ids is decoded; pass a 'prompt' column instead.",
        FutureWarning,
        stacklevel=4,
    )
    return dataset.map(lambda row: {"prompt": tokenizer.decode(row["input_ids"])})
