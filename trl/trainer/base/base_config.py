"""Options that trainers of every kind share, in groups that their configurations inherit."""

import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate import ParallelismConfig
from transformers import TrainingArguments
from transformers.integrations import integration_utils as trackers
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType
from transformers.utils import is_torch_bf16_gpu_available

from ...imports import require
from ...memory.options import MemoryOptions
from ...options import option
from ...process_group import check_not_alone, launched_on_cpu
from ...redaction import redact
from ...suggestions import did_you_mean
from .best_metric import check_best_model_options
from .keyword_arguments import EARLIER_ARGUMENTS, StrictKeywordArguments
from .options import check_options, from_json, option_types

# Ranges of options that transformers declares and does not check.
NOT_NEGATIVE = (
    "adam_epsilon",
    "dataloader_num_workers",
    "eval_steps",
    "learning_rate",
    "logging_steps",
    "max_grad_norm",
    "save_steps",
    "seed",
    "warmup_steps",
    "weight_decay",
)
SIZES = "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"
INHERITED: dict[str, Any] = {name: {"ge": 0} for name in NOT_NEGATIVE} | {
    **{name: {"ge": 1} for name in SIZES},
    **{name: {"ge": 0, "lt": 1} for name in ("adam_beta1", "adam_beta2")},
    "num_train_epochs": {"gt": 0},
}

# Packages of trackers that have another name than the tracker.
PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "dagshub": "dagshub mlflow"}


@dataclass
class LoopOptions:
    """What the loop does about non-finite numbers, checkpoints and resuming."""

    non_finite: str = option(
        "raise",
        "What to do when a loss or gradient is NaN or infinite: stop, or skip that update.",
        choices=("raise", "skip"),
    )
    resume_with_changes: bool = option(
        False, "Resume even if settings differ from those of the checkpoint."
    )
    checkpoint_checksums: str = option(
        "sampled",
        "Checksums of checkpoint files: of all bytes, or of samples of files above 16 MiB.",
        choices=("sampled", "all"),
    )


@dataclass
class PolicyOptions:
    """How the model that is trained is loaded and changed."""

    model_init_kwargs: dict | str | None = option(
        None, "Keyword arguments of from_pretrained when the model is given by name (JSON)."
    )
    trust_remote_code: bool = option(False, "Execute code shipped with a model or tokenizer.")
    disable_dropout: bool = option(False, "Set the probability of every dropout layer to zero.")
    router_aux_loss_coef: float | None = option(
        None, "Weight of a mixture of experts' load-balancing loss. None: as in the model's config."
    )
    cast_lm_head_to_fp32: bool = option(
        False, "Compute the output projection in float32, whatever the precision of the rest."
    )


@dataclass
class ReferenceOptions:
    """The reference policy, and whether it moves."""

    beta: float = option(
        0.0, "Weight of the KL penalty; 0: no reference policy.", ge=0, hint="0: no KL penalty"
    )
    sync_ref_model: bool = option(False, "Move the reference policy towards the policy.")
    ref_model_mixup_alpha: float = option(
        0.6, "Share of the policy that an update mixes into the reference.", ge=0, le=1
    )
    ref_model_sync_steps: int = option(512, "Optimizer steps between two reference updates.", ge=1)
    ref_model_init_kwargs: dict | str | None = option(
        None, "Arguments of from_pretrained for a ref_model given by name. None: model_init_kwargs."
    )


@dataclass
class BaseConfig(
    StrictKeywordArguments, LoopOptions, PolicyOptions, MemoryOptions, TrainingArguments
):
    """`transformers.TrainingArguments` with the defaults of this package."""

    legacy_options = EARLIER_ARGUMENTS
    trains_reward_model: ClassVar[bool] = False
    divides_rows: ClassVar[bool] = False  # among ranks: context parallelism
    # What counts as one in per_device_train_batch_size: so many rows, which are never separated.
    unit: ClassVar[int] = 1
    # Options of `TrainingArguments` that would do nothing, or harm; and why.
    without_meaning: ClassVar[dict[str, str]] = {
        "torch_compile": (
            "micro-batches differ in length, so the model would be compiled again and again, and "
            "its layers are also called outside of its forward, with any torch_compile_backend or "
            "torch_compile_mode"
        ),
    }

    logging_steps: float = option(10, "Updates between two logs; below 1, a share of all updates.")
    gradient_checkpointing: bool | None = option(
        True, "Recompute activations in backward: less memory, about a third more time."
    )
    bf16: bool | None = option(
        None, "Train with bfloat16 autocast. None: if the device supports it and fp16 is off."
    )
    lr_scheduler_kwargs: dict | str | None = option(None, "Arguments of the scheduler (JSON).")
    logging_nan_inf_filter: bool = option(
        False, "No effect: non_finite replaces this filter, which would slow down each micro-batch."
    )

    def __post_init__(self) -> None:
        if "warmup_ratio" in self.given_by_old_names and self.warmup_steps >= 1:
            raise ValueError(
                f"warmup_ratio={self.warmup_steps:g} must be below 1, as a share of all steps; a "
                "number of steps is given by warmup_steps."
            )
        check_options(self, INHERITED)
        self.logging_nan_inf_filter = False
        self.pad_to_multiple_of = _multiple(str(self.pad_to_multiple_of).lower())
        self._resolve_device()
        if self.deepspeed is not None:
            require("deepspeed", "deepspeed")
        self.selective_checkpointing = self._resolve_checkpointing()
        # transformers parses JSON text of the options in this list.
        self._VALID_DICT_FIELDS = [
            name for name, types in option_types(type(self)).items() if dict in types
        ]
        check_best_model_options(self)
        super().__post_init__()
        check_not_alone(self.world_size)
        self._check_scheduler_arguments()
        self._check_packages()
        for problem, is_there in self._problems().items():
            if is_there:
                raise ValueError(f"{problem}.")

    def _resolve_device(self) -> None:
        """Choose bf16, and the CPU for processes that nothing else connects."""
        if self.bf16 is None:
            # On a machine without a fitting GPU, transformers refuses bf16 unless told use_cpu.
            on_cpu = bool(self.use_cpu)  # type: ignore[has-type]
            self.bf16 = not self.fp16 and (on_cpu or is_torch_bf16_gpu_available())
        if not (self.deepspeed or self.fsdp) and launched_on_cpu():
            self.use_cpu = True

    @property
    def piece_tokens(self) -> int:
        """The most tokens in a piece of a micro-batch; 0: it stays whole."""
        return self.max_tokens_per_piece or 0

    @property
    def parallelism(self) -> ParallelismConfig:
        """That of `parallelism_config`, or else of `accelerate launch` and the environment."""
        return self.parallelism_config or ParallelismConfig()

    @property
    def ranks_per_row(self) -> int:
        """Ranks that divide the tokens of each row: `cp_size`, or `sp_size` without FSDP2."""
        return int(max(self.parallelism.cp_size, self.parallelism.sp_size))

    def to_dict(self) -> dict[str, Any]:
        """All options by name, with placeholders for secrets, at any depth; see `redact`.

        Run records, checkpoints and trackers take a configuration from here.
        """
        options = super().to_dict()
        # transformers hides special tokens of the vocabulary, too.
        options |= {
            name: value
            for name, value in vars(self).items()
            if name in options and name.endswith("_token")
        }
        public: dict[str, Any] = redact(options)
        return public

    def __str__(self) -> str:
        options = sorted(self.to_dict().items())
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in options)})"

    def _resolve_checkpointing(self) -> bool:
        """Whether it is selective: a key that is taken out of what transformers reads."""
        chosen = False
        # Newer releases of transformers call the option activation_checkpointing.
        if vars(self).get("activation_checkpointing", True) is None:
            self.activation_checkpointing = self.gradient_checkpointing
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            given = dict(from_json(vars(self).get(name)) or {})
            fits = self.gradient_checkpointing and not given.get("use_reentrant")
            if given.get("selective") and not fits:
                raise ValueError(
                    f"{name}: 'selective' needs gradient_checkpointing=True, and use_reentrant "
                    "must not be True."
                )
            if "selective" in given:
                chosen |= bool(given.pop("selective"))
                setattr(self, name, {"use_reentrant": False} | given)
        return chosen

    def _problems(self) -> dict[str, Any]:
        """Messages about options that cannot be used together, and whether they apply."""
        values = vars(self)
        unusable = {name: values[name] for name in self.without_meaning}
        divides = self.ranks_per_row > 1 and not self.divides_rows
        return {
            # transformers would take one step for 0, and all epochs for any number below.
            f"max_steps={self.max_steps} must be above 0, or -1 to train for num_train_epochs": (
                self.max_steps == 0 or self.max_steps < -1
            ),
            **{
                f"{name}={x!r} cannot be used: {self.without_meaning[name]}. Leave it out": x
                for name, x in unusable.items()
            },
            "learning_rate=inf must be finite": math.isinf(self.learning_rate),
            f"cp_size={self.ranks_per_row} (or sp_size): context parallelism is for trainers that "
            "learn from the rows of a dataset: SFT, DPO, KTO, reward models. Leave it out": divides,
        }

    def _check_scheduler_arguments(self) -> None:
        """Refuse arguments that the schedule does not have, before the model is loaded."""
        arguments: Any = self.lr_scheduler_kwargs or {}
        schedule = TYPE_TO_SCHEDULER_FUNCTION.get(SchedulerType(self.lr_scheduler_type))
        parameters = {} if schedule is None else inspect.signature(schedule).parameters
        if schedule is None or any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
            return
        for name in arguments:
            if name not in parameters:
                hint = did_you_mean(name, parameters)
                scheduler = SchedulerType(self.lr_scheduler_type).value
                raise ValueError(
                    f"lr_scheduler_kwargs[{name!r}]: lr_scheduler_type={scheduler!r} has no such "
                    f"argument.{hint}"
                )

    def _check_packages(self) -> None:
        """Refuse missing packages now; otherwise the model would be loaded first."""
        if self.use_liger_kernel:
            require("liger_kernel", "use_liger_kernel=True")
            kernels: Any = vars(self)["liger_kernel_config"]
            self.liger_kernel_config = _layers_only(kernels or {})
        chosen: Any = self.report_to  # a list by now
        tracker_names = [*trackers.INTEGRATION_TO_CALLBACK, "flyte"]
        for name in chosen:
            if name not in tracker_names:
                hint = did_you_mean(name, tracker_names)
                raise ValueError(f"report_to={name!r} is not a known tracker.{hint}")
            if name not in ("flyte", *trackers.get_available_reporting_integrations()):
                package = PACKAGES.get(name, name)
                raise ValueError(
                    f"report_to={name!r} needs the package `{package}`, which is not installed. "
                    f"Run: pip install {package}; or set report_to='none'."
                )


def _layers_only(kernels: dict[str, bool]) -> dict[str, bool]:
    """Liger's kernels of layers; with its loss, no forward would give log-probabilities."""
    for name in ("fused_linear_cross_entropy", "cross_entropy"):
        if kernels.get(name):
            raise ValueError(
                f"liger_kernel_config={{{name!r}: True}} cannot be used: the loss is computed from "
                "log-probabilities, in tiles (logits_chunk_size). Leave it out."
            )
    return kernels | {"fused_linear_cross_entropy": False, "cross_entropy": False}


def _multiple(text: str) -> int | None:
    if text not in ("auto", "none", "null") and not text.isdecimal():
        raise ValueError(f"pad_to_multiple_of={text!r} must be a number of tokens, or 'auto'.")
    return max(int(text), 1) if text.isdecimal() else None
