"""Defaults shared by every trainer of this package."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.utils import is_torch_bf16_gpu_available

from ...imports import require
from ...text import did_you_mean
from .option_groups import LoopOptions, MemoryOptions, PolicyOptions
from .options import check_options, option

# Ranges of options that transformers declares and does not check.
INHERITED = {
    "per_device_train_batch_size": {"ge": 1},
    "per_device_eval_batch_size": {"ge": 1},
    "gradient_accumulation_steps": {"ge": 1},
    "learning_rate": {"ge": 0},
    "weight_decay": {"ge": 0},
    "max_grad_norm": {"ge": 0},
    "num_train_epochs": {"gt": 0},
    "warmup_steps": {"ge": 0},
    "save_steps": {"ge": 0},
    "eval_steps": {"ge": 0},
    "adam_beta1": {"ge": 0, "lt": 1},
    "adam_beta2": {"ge": 0, "lt": 1},
    "adam_epsilon": {"ge": 0},
    "dataloader_num_workers": {"ge": 0},
}

# Packages of trackers that have another name than the tracker.
PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "dagshub": "dagshub mlflow"}


@dataclass
class BaseConfig(LoopOptions, PolicyOptions, MemoryOptions, TrainingArguments):
    """`transformers.TrainingArguments` with the defaults of this package."""

    legacy_options: ClassVar[dict[str, str | None]] = {}
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    logging_steps: float = option(
        10, "Log every this many optimizer steps; a ratio of all steps if below 1."
    )
    gradient_checkpointing: bool | None = option(
        True, "Recompute activations in backward: less memory, about a third more time."
    )
    bf16: bool | None = option(
        None, "Train in bfloat16 autocast. None: yes where it is supported, unless fp16 is chosen."
    )
    lr_scheduler_kwargs: dict | str | None = option(
        None, "Extra arguments of the learning-rate scheduler (JSON)."
    )

    logging_nan_inf_filter: bool = option(
        False, "No effect: see non_finite. As transformers filters, each micro-batch is waited for."
    )

    def __post_init__(self) -> None:
        check_options(self, INHERITED)
        self.logging_nan_inf_filter = False
        if self.bf16 is None:
            # On a machine without a fitting GPU, transformers refuses bf16 unless told use_cpu.
            self.bf16 = not self.fp16 and (self.use_cpu or is_torch_bf16_gpu_available())
        # Newer releases of transformers read the option under another name.
        names = {field.name for field in dataclasses.fields(self)}
        new: str = "activation_checkpointing"
        if new in names and getattr(self, new) is None:
            setattr(self, new, self.gradient_checkpointing)
        self._check_mappings()
        self._check_packages()
        super().__post_init__()
        self._check_trackers()
        if self.torch_compile:
            raise ValueError(
                "torch_compile=True cannot be used: micro-batches differ in length, so the model "
                "would be compiled again and again, and its layers are also called outside of its "
                "forward. Leave torch_compile, torch_compile_backend and torch_compile_mode out."
            )
        if self.use_liger_kernel:
            kernels: str = "liger_kernel_config"  # declared without a type that is known
            setattr(self, kernels, _layers_only(getattr(self, kernels) or {}))

    def _check_packages(self) -> None:
        if self.use_liger_kernel:
            require("liger_kernel", "use_liger_kernel=True")
        if self.deepspeed is not None:
            require("deepspeed", "deepspeed")

    def _check_trackers(self) -> None:
        """Without this, what is missing would be said after the model has been loaded."""
        known = [*INTEGRATION_TO_CALLBACK, "flyte"]
        for name in self.report_to if isinstance(self.report_to, list) else ():
            if name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(f"report_to={name!r} is not a known tracker.{hint}")
            if name not in ("flyte", *get_available_reporting_integrations()):
                package = PACKAGES.get(name, name)
                raise ValueError(
                    f"report_to={name!r} needs the package `{package}`, which is not installed. "
                    f"Run: pip install {package}; or set report_to='none'."
                )

    def _check_mappings(self) -> None:
        """Text that is not a JSON object would be taken apart into letters later on."""
        for name in set(self._VALID_DICT_FIELDS) - set(TrainingArguments._VALID_DICT_FIELDS):
            value = getattr(self, name)
            if not isinstance(_from_json(value), dict | None):
                raise ValueError(
                    f"{name} must be a dictionary, or a JSON object such as '{{\"a\": 1}}', "
                    f"not {value!r}."
                )


def _layers_only(kernels: dict[str, bool]) -> dict[str, bool]:
    """Liger's kernels of layers; its loss would replace the forward that gives log-probabilities.

    Raises:
        ValueError: if the loss was asked for.
    """
    for name in ("fused_linear_cross_entropy", "cross_entropy"):
        if kernels.get(name):
            raise ValueError(
                f"liger_kernel_config={{{name!r}: True}} cannot be used: the loss is computed from "
                "log-probabilities, in tiles (logits_chunk_size). Leave it out."
            )
    return kernels | {"fused_linear_cross_entropy": False, "cross_entropy": False}


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value
