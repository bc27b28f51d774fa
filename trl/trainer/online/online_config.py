"""Options shared by every trainer that generates its own completions."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import ClassVar

from ...types import Mode
from ..base.option_groups import ReferenceOptions
from ..base.options import option
from .batch_math import BatchPlan, check_eval_groups, check_groups, resolve_rounds
from .rollout_correction_config import MismatchConfig

# They compare any engine, or a rollout function, with the trainer.
FOR_ANY_ENGINE = ("vllm_importance_sampling_", "vllm_max_logp_gap", "vllm_logp_gap_action")


@dataclass
class OnlineConfig(ReferenceOptions, MismatchConfig):
    """Configuration of the online skeleton: sampling, rewards, batching, reference policy."""

    _VALID_DICT_FIELDS = [
        *MismatchConfig._VALID_DICT_FIELDS,
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]
    kl_in_reward: ClassVar[bool] = False  # otherwise the KL penalty is part of the loss

    # --- Optimization ---
    learning_rate: float = option(1e-6, "Initial learning rate.", ge=0)
    remove_unused_columns: bool | None = option(
        False, "Keep only the prompt columns; reward functions then get no other column."
    )

    dataloader_pin_memory: bool = option(False, "Pin memory; rows are text, so there is no need.")

    # --- Batches ---
    num_generations: int | None = option(2, "Completions for each prompt (G).")
    num_generations_eval: int | None = option(
        None, "Completions for each prompt in evaluation. None: num_generations."
    )
    generation_batch_size: int | None = option(
        None, "Completions of one generation round over all ranks. None: from the batch sizes."
    )
    steps_per_generation: int | None = option(
        None, "Micro-batches a generation round is cut into. None: gradient_accumulation_steps."
    )
    num_iterations: int = option(1, "Passes of optimization over each generation round.", ge=1)
    shuffle_dataset: bool | None = option(True, "Shuffle the training prompts.")
    pad_to_multiple_of: int | str | None = option(
        "auto", "Pad widths to a multiple of this; auto means none except on Neuron devices."
    )

    # --- Memory ---
    skip_zero_advantages: bool = option(
        True, "Run no forward with gradient for completions whose gradient is exactly zero."
    )
    reuse_sampling_logps: bool = option(
        True, "Take the log-probabilities of the KL penalty from generation, if it was on-policy."
    )
    generation_max_rows: int | None = option(
        None, "Most completions generated at once on a rank. None: all of a round.", ge=1
    )
    generation_max_kv_gb: float | None = option(
        None, "Most GB of key-value cache held at once while generating. None: no limit.", gt=0
    )

    # --- Generation ---
    max_prompt_length: int | None = option(
        None, "Most tokens of a prompt. None: what the model can see.", ge=1
    )
    long_prompts: str = option(
        "error",
        "What becomes of prompts that are too long; cut-left keeps their end.",
        choices=("error", "drop", "cut-left"),
    )
    max_completion_length: int = option(512, "Most tokens of a completion.", ge=1)
    temperature: float = option(
        1.0,
        "Sampling temperature; also divides the logits in training.",
        gt=0,
        hint="for greedy decoding: generation_kwargs={'do_sample': False}",
    )
    top_p: float = option(
        1.0, "Sample from the smallest set of tokens with this probability.", gt=0, le=1
    )
    top_k: int | None = option(
        0, "Sample from this many most likely tokens; 0 or None: all.", ge=0, hint="0: off"
    )
    min_p: float | None = option(
        None, "Drop tokens less likely than this share of the most likely one.", ge=0, le=1
    )
    repetition_penalty: float = option(
        1.0, "Above 1, tokens already present become less likely.", gt=0
    )
    generation_kwargs: dict | str | None = option(
        None, "More options of the generation engine (JSON); they win over the named ones."
    )
    chat_template_kwargs: dict | str | None = option(
        None, "Extra arguments of the chat template (JSON)."
    )
    cache_implementation: str | None = option(None, "Kind of key-value cache for generation.")
    ds3_gather_for_generation: bool = option(
        True, "ZeRO-3, FSDP: gather all weights once for generation; False: one layer at a time."
    )
    use_transformers_continuous_batching: bool = option(
        False, "Generate with the continuous batching of transformers."
    )
    transformers_continuous_batching_config: dict | str | None = option(
        None, "Options of continuous batching (JSON)."
    )
    use_transformers_paged: bool = option(
        False, "Deprecated: use_transformers_continuous_batching."
    )
    use_vllm: bool = option(False, "Generate with vLLM.")
    vllm_mode: str = option(
        "colocate", "Run vLLM in this process or on a server.", choices=("colocate", "server")
    )
    vllm_model_impl: str = option(
        "vllm", "Model implementation that vLLM uses.", choices=("vllm", "transformers")
    )
    vllm_enable_sleep_mode: bool = option(
        False, "Free the memory of the vLLM engine outside generation."
    )
    vllm_structured_outputs_regex: str | None = option(
        None, "Regular expression that completions must match."
    )
    vllm_server_base_url: str | None = option(None, "Address of the vLLM server.")
    vllm_server_host: str = option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = option(8000, "Port of the vLLM server.")
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the vLLM server.")
    vllm_group_port: int = option(51216, "Port over which weights are sent to the vLLM server.")
    vllm_gpu_memory_utilization: float | None = option(
        None,
        "Share of the GPU memory for a colocated engine. None: what training leaves of it.",
        gt=0,
        le=1,
    )
    vllm_max_model_length: int | None = option(
        None, "Context length of a colocated engine. None: from the model.", ge=1
    )
    vllm_tensor_parallel_size: int = option(1, "Ranks over which a colocated engine is split.")
    vllm_probe_syncs: int = option(
        50,
        "Compare log-probabilities with vLLM at one of so many weight syncs; 0: never.",
        ge=0,
        hint="0: never",
    )
    vllm_sync_adapter_only: bool = option(
        False, "Send base weights to a colocated engine once, and then only the LoRA adapter."
    )

    # --- Policy objective ---
    epsilon: float = option(0.2, "Clip width of the probability ratio.", ge=0)
    epsilon_high: float | None = option(None, "Upper clip width. None: epsilon.")
    mask_truncated_completions: bool = option(
        False, "Leave completions cut at the token limit out of loss and baselines."
    )

    # --- Rewards ---
    reward_weights: list[float] | None = option(
        None, "One weight for each reward function. None: all 1."
    )
    reward_timeout: float | None = option(
        None, "Seconds a call of a reward function may take. None: no limit.", gt=0
    )
    reward_dry_run: bool = option(
        True, "Call the reward functions on one row before training, to find mistakes early."
    )

    # --- Logging ---
    log_completions: bool = option(
        False, "Show completions and their rewards at each log, and send them to the trackers."
    )
    log_multimodal: bool = option(True, "Keep images for the completions table.")
    num_completions_to_print: int | None = option(
        None, "How many completions to show, drawn at random. None: all."
    )
    log_unique_prompts: bool = option(
        False, "Send each prompt once to the trackers' completions table."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolve_aliases()
        self._refuse_unsupported()
        self._warn_unused()
        self._resolve_batches()

    @property
    def group_size(self) -> int:
        """Completions for each prompt in training."""
        return self.num_generations or 0

    @property
    def eval_group_size(self) -> int:
        """Completions for each prompt in evaluation."""
        chosen = self.num_generations_eval
        return self.group_size if chosen is None else chosen

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper clip width of the probability ratio."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    def group_size_in(self, mode: Mode) -> int:
        """Completions for each prompt in training or evaluation."""
        return self.group_size if mode == "train" else self.eval_group_size

    @property
    def generation_max_kv_bytes(self) -> float | None:
        """`generation_max_kv_gb` in bytes."""
        return None if self.generation_max_kv_gb is None else self.generation_max_kv_gb * 1e9

    @property
    def batch_plan(self) -> BatchPlan:
        """The batch arithmetic of training."""
        return BatchPlan(
            micro_batch=self.per_device_train_batch_size,
            num_processes=self.world_size,
            micro_batches=self.steps_per_generation or self.gradient_accumulation_steps,
            accumulation=self.gradient_accumulation_steps,
            group_size=self.group_size,
            iterations=self.num_iterations,
        )

    @property
    def penalizes_rewards(self) -> bool:
        """Whether the KL penalty is part of the reward."""
        return self.kl_in_reward and self.beta != 0.0

    @property
    def scores_policy(self) -> bool:
        """Whether the policy is scored without gradient: off-policy, or for a KL in the reward."""
        own_engine = not (self.use_vllm or self.use_transformers_continuous_batching)
        is_known = own_engine and self.reuse_sampling_logps
        return not self.batch_plan.is_on_policy or (self.penalizes_rewards and not is_known)

    def _resolve_aliases(self) -> None:
        if self.use_transformers_paged:
            warnings.warn(
                "use_transformers_paged is deprecated; use use_transformers_continuous_batching.",
                FutureWarning,
                stacklevel=4,
            )
            self.use_transformers_paged = False
            self.use_transformers_continuous_batching = True
        self.top_k = self.top_k or 0
        if isinstance(self.pad_to_multiple_of, str):
            text = self.pad_to_multiple_of.lower()
            self.pad_to_multiple_of = None if text in ("auto", "none", "null") else int(text)

    def _refuse_unsupported(self) -> None:
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True would break up groups of completions. Lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps instead: the "
                "gradient stays the same."
            )
        if self.use_vllm and not self.ds3_gather_for_generation:
            raise ValueError(
                "ds3_gather_for_generation=False cannot be used with use_vllm=True: it says how "
                "transformers generates. Leave one of them out."
            )
        self._refuse_without_meaning()
        self._check_reference()
        self._check_adapter_sync()
        parallelism = self.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "parallelism_config with context or sequence parallelism cannot be "
                "used by trainers that generate completions."
            )

    def _refuse_without_meaning(self) -> None:
        """Refuse options of `TrainingArguments` for losses on labels; some would do harm."""
        given = {
            "label_smoothing_factor": self.label_smoothing_factor != 0.0,
            "neftune_noise_alpha": self.neftune_noise_alpha is not None,
            "train_sampling_strategy": (
                getattr(self, "train_sampling_strategy", "random") == "group_by_length"
            ),
        }
        found = [name for name, is_set in given.items() if is_set]
        if found:
            raise ValueError(
                f"{found[0]}={getattr(self, found[0])!r} cannot be used by trainers that generate "
                "their completions. Leave it out."
            )

    def _check_reference(self) -> None:
        if self.sync_ref_model and self.beta == 0.0:
            raise ValueError("sync_ref_model=True needs a reference policy: set beta above 0.")

    def _check_adapter_sync(self) -> None:
        reasons = {
            "vllm_enable_sleep_mode=True: base weights that sleep would be sent again each time": (
                self.vllm_enable_sleep_mode
            ),
            "vllm_tensor_parallel_size above 1": self.vllm_tensor_parallel_size > 1,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if self.use_vllm and self.vllm_sync_adapter_only and found:
            raise ValueError(f"vllm_sync_adapter_only=True cannot be used with {found[0]}.")

    def _warn_unused(self) -> None:
        if self.use_vllm:
            return
        changed = [
            field.name
            for field in dataclasses.fields(self)
            if field.name.startswith("vllm_")
            and not field.name.startswith(FOR_ANY_ENGINE)
            and getattr(self, field.name) != field.default
        ]
        if changed:
            warnings.warn(
                f"{', '.join(changed)}: without use_vllm=True no vLLM engine generates, so they "
                "have no effect.",
                stacklevel=4,
            )

    def _resolve_batches(self) -> None:
        rows = self.per_device_train_batch_size * self.world_size
        self.generation_batch_size, self.steps_per_generation = resolve_rounds(
            rows,
            self.gradient_accumulation_steps,
            self.generation_batch_size,
            self.steps_per_generation,
        )
        check_groups(self.generation_batch_size, self.num_generations, rows)
        if self.eval_strategy != "no":
            check_eval_groups(
                self.per_device_eval_batch_size, self.world_size, self.eval_group_size
            )
