"""Suggest the name a user probably meant. Imports the standard library alone."""

import difflib
from collections.abc import Iterable

# Names from other programs or earlier releases, with the names they may have here. The first legal
# one is meant.
COMMON_MISTAKES: dict[str, tuple[str, ...]] = {
    "batch_size": ("per_device_train_batch_size",),
    "dataset": ("dataset_name", "train_dataset"),
    "epochs": ("num_train_epochs",),
    "eval_batch_size": ("per_device_eval_batch_size",),
    "group_by_length": ("train_sampling_strategy",),
    "lr": ("learning_rate",),
    "max_seq_length": ("max_length",),
    "model": ("model_name_or_path",),
    "model_name": ("model_name_or_path",),
    "model_path": ("model_name_or_path",),
    "nproc_per_node": ("num_processes",),
    "num_epochs": ("num_train_epochs",),
    "scheduler": ("lr_scheduler_type",),
    "steps": ("max_steps",),
    "tokenizer": ("processing_class", "tokenizer_name_or_path"),
    "train_batch_size": ("per_device_train_batch_size",),
    "use_liger": ("use_liger_kernel",),
    "use_lora": ("use_peft",),
    "warmup": ("warmup_steps",),
}


def commonly_meant(name: str, legal_names: Iterable[str]) -> str | None:
    """Return the legal name that is meant by a common mistake; None if `name` is not one."""
    legal = set(legal_names)
    for candidate in COMMON_MISTAKES.get(name, ()):
        if candidate in legal:
            return candidate
    return None


def did_you_mean(
    name: str, legal_names: Iterable[str], otherwise: str = "", cutoff: float = 0.6
) -> str:
    """Return " Did you mean X?" for the legal name closest to `name`, or else `otherwise`.

    Args:
        cutoff: how similar the two names must be, from 0 to 1.
    """
    closest = difflib.get_close_matches(name, list(legal_names), n=1, cutoff=cutoff)
    return f" Did you mean {closest[0]}?" if closest else otherwise
