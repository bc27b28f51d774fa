"""Options shared by every trainer that generates its own completions."""

import dataclasses
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from ...algorithms.base import Algorithm
from ...generation.options import GenerationOptions
from ...ops.policy_losses import MODES
from ...options import changed_options, option
from ...types import Mode, TokenScores
from ..base.base_config import BaseConfig, ReferenceOptions
from .batch_math import BatchPlan, check_eval_groups, check_groups, resolve_rounds

# Other options with this prefix compare the probabilities of any engine with the trainer's.
OF_VLLM_ALONE = re.compile("vllm_(?!importance|max_logp|logp)")


@dataclass
class OnlineConfig(GenerationOptions, ReferenceOptions, BaseConfig):
    """Batches, rewards and objective of trainers that generate, with the groups of others."""

    least_group: ClassVar[int] = 2  # completions for each prompt
    without_meaning = BaseConfig.without_meaning | {
        "auto_find_batch_size": (
            "it would break up groups of completions. Lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps instead: the gradient stays the same"
        ),
        "label_smoothing_factor": "completions have no labels",
        "neftune_noise_alpha": "completions are generated without noise",
    }

    learning_rate: float = option(1e-6, "Initial learning rate.", ge=0)
    remove_unused_columns: bool | None = option(
        False, "Keep only the prompt columns; reward functions then get no other column."
    )
    dataloader_pin_memory: bool = option(False, "Pin memory; not needed, because rows are text.")
    # --- Batches ---
    num_generations: int | None = option(2, "Completions for each prompt (G).")
    num_generations_eval: int | None = option(None, "G in evaluation. None: num_generations.")
    generation_batch_size: int | None = option(
        None, "Completions of one generation round, over all ranks. None: from the batch sizes."
    )
    steps_per_generation: int | None = option(
        None, "Micro-batches of a generation round. None: gradient_accumulation_steps.", ge=1
    )
    num_iterations: int = option(1, "Passes of optimization over each generation round.", ge=1)
    shuffle_dataset: bool | None = option(True, "Shuffle the training prompts.")
    skip_zero_advantages: bool = option(
        True, "Do not compute completions whose gradient is exactly zero."
    )
    reuse_sampling_logps: bool | None = option(
        None,
        "Take the log-probabilities of the KL penalty from generation, if training is on-policy. "
        "None: in float32 only; in half precision, generation and scoring round differently.",
    )
    max_prompt_length: int | None = option(
        None, "Maximum length of a prompt in tokens. None: the context of the model.", ge=1
    )
    long_prompts: str = option(
        "error",
        "What to do with prompts that are too long; cut-left keeps their end.",
        choices=("error", "drop", "cut-left"),
    )
    chat_template_kwargs: dict | str | None = option(None, "Arguments of the chat template (JSON).")
    # --- Engines that draw with other probabilities than the policy's ---
    vllm_importance_sampling_correction: bool = option(
        True, "Weight the loss by the ratio of trainer to engine probabilities."
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "A ratio for each token or completion; beyond the bounds it is truncated or masked.",
        choices=MODES,
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0, "Upper bound of the ratio.", gt=0, hint="None: no bound"
    )
    vllm_importance_sampling_clip_min: float | None = option(None, "The ratio's lower bound.", ge=0)
    vllm_max_logp_gap: float | None = option(
        None,
        "Largest mean difference, in nats, between a token's log-probability and the engine's.",
        gt=0,
        hint="None: no bound",
    )
    vllm_logp_gap_action: str = option(
        "raise", "Beyond vllm_max_logp_gap: stop, or warn.", choices=("warn", "raise")
    )
    # --- Policy objective ---
    epsilon: float = option(0.2, "Clip width of the probability ratio.", ge=0)
    epsilon_high: float | None = option(None, "Upper clip width. None: epsilon.", ge=0)
    mask_truncated_completions: bool = option(
        False, "Leave truncated completions out of the loss and of baselines."
    )
    # --- Rewards ---
    reward_weights: list[float] | None = option(None, "Weight of each reward function. None: 1.")
    reward_timeout: float | None = option(None, "Seconds per reward call. None: unlimited.", gt=0)
    reward_dry_run: bool = option(True, "Call reward functions on one row before training.")
    # --- Logging ---
    log_completions: bool = option(
        False, "Show completions and their rewards at each log, and send them to the trackers."
    )
    log_multimodal: bool = option(True, "Keep images for the completions table.")
    num_completions_to_print: int | None = option(
        None, "How many completions to show, drawn at random. None: all.", ge=0
    )
    log_unique_prompts: bool = option(False, "Send each prompt once to the completions table.")
    log_token_logps: bool = option(False, "Record log-probabilities of tokens, for trl report.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.top_k = self.top_k or 0
        names = [x.name for x in dataclasses.fields(self) if OF_VLLM_ALONE.match(x.name)]
        if not self.use_vllm and (found := changed_options(self, names)):
            words = "without use_vllm=True no vLLM engine generates, so they have no effect."
            warnings.warn(f"{', '.join(found)}: {words}", stacklevel=3)
        rows = self.per_device_train_batch_size * self.unit * self.world_size
        steps, size = self.gradient_accumulation_steps, self.generation_batch_size
        self.generation_batch_size, self.steps_per_generation = resolve_rounds(
            rows, steps, size, self.steps_per_generation
        )
        check_groups(self.generation_batch_size, self.num_generations, rows, least=self.least_group)
        if self.eval_strategy != "no":
            check_eval_groups(self.eval_rows, self.world_size, self.group_size_in("eval"))
        if "total_episodes" in self.given_by_old_names:  # completions to train on, not updates
            plan = self.batch_plan
            self.max_steps: int = math.ceil(self.max_steps * plan.iterations / plan.update_rows)

    @property
    def eval_rows(self) -> int:
        """Completions of an evaluation batch on a rank."""
        return self.per_device_eval_batch_size * self.unit

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper clip width of the probability ratio."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    def group_size_in(self, mode: Mode) -> int:
        """Completions for each prompt in training or evaluation."""
        chosen = None if mode == "train" else self.num_generations_eval
        return (self.num_generations or 0) if chosen is None else chosen

    @property
    def batch_plan(self) -> BatchPlan:
        """The batch arithmetic of training."""
        return BatchPlan(
            micro_batch=self.per_device_train_batch_size * self.unit,
            num_processes=self.world_size,
            micro_batches=self.steps_per_generation or self.gradient_accumulation_steps,
            accumulation=self.gradient_accumulation_steps,
            group_size=self.group_size_in("train"),
            iterations=self.num_iterations,
        )

    def make_algorithm(self) -> Algorithm[TokenScores]:
        """Make the algorithm of these options."""
        raise NotImplementedError

    @property
    def scores_policy(self) -> bool:
        """Whether the policy is scored without gradient: off-policy, or for credit."""
        needs = self.make_algorithm().needs
        if not self.batch_plan.is_on_policy or needs.values or needs.credit_entropies:
            return True
        own_engine = not (self.use_vllm or self.use_transformers_continuous_batching)
        reuses = self.reuse_sampling_logps
        if reuses is None:  # what the model is loaded in is not known here
            reuses = not (self.bf16 or self.fp16)
        is_known = own_engine and reuses
        return needs.old_logps and not is_known

    def _problems(self) -> dict[str, Any]:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        mode, found = self.vllm_importance_sampling_mode, super()._problems()
        truncates = self.vllm_importance_sampling_correction and mode.endswith("_truncate")
        by_length = self.train_sampling_strategy == "group_by_length"
        return found | {
            f"vllm_server_host={self.vllm_server_host!r} must be the name of a machine, such as "
            "localhost; a whole address is given by vllm_server_base_url": (
                "/" in self.vllm_server_host
            ),
            f"vllm_importance_sampling_clip_min={low} must be below "
            f"vllm_importance_sampling_clip_max={high}": (
                low is not None and low >= (high or math.inf)
            ),
            f"vllm_importance_sampling_mode={mode!r} needs a bound: set "
            "vllm_importance_sampling_clip_max, such as 3.0": truncates
            and low is None
            and high is None,
            "train_sampling_strategy='group_by_length' cannot be used: the lengths of completions "
            "are not known before they are generated. Leave it out": by_length,
            "sync_ref_model=True needs a reference policy: set beta above 0": (
                self.sync_ref_model and not self.beta
            ),
            **self.engine_problems(),
        }
