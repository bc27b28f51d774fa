"""Names under which scripts and callbacks of Hugging Face TRL know trainers and their options."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from .base.options import EARLIER_ARGUMENTS, RemovedOption, ignored, refused

Trainer = TypeVar("Trainer", bound=type)

# Options with these names, where the configuration has them.
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
    *("padding_free", "completion_only_loss", "f_divergence_type", "f_alpha_divergence_coef"),
    *("label_smoothing", "ld_alpha", "use_weighting", "desirable_weight", "undesirable_weight"),
)
OTHERS: dict[str, Callable[[Any], Any]] = {
    "num_generations_eval": lambda found: found.args.group_size_in("eval"),
    "epsilon_low": lambda found: found.args.clip_range[0],
    "epsilon_high": lambda found: found.args.clip_range[1],
    "entropy_coef": attrgetter("entropy.coefficient"),
    "generation_kwargs": lambda found: found.args.generation_kwargs or {},
    "chat_template_kwargs": lambda found: found.args.chat_template_kwargs or {},
    "eos_token_ids": lambda found: list(found.sampling.stop_ids),
    "generation_config": lambda found: _generation_config(found.args.use_vllm, found.sampling),
    "router_aux_loss_coef": attrgetter("router_coefficient"),
    "aux_loss_enabled": lambda found: found.router_coefficient != 0.0,
    "ref_model": lambda found: (  # None if it is the policy's, with another adapter or none
        None if hasattr(found.reference, "adapter") else getattr(found.reference, "model", None)
    ),
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
    "continuous_batching_config": attrgetter("args.transformers_continuous_batching_config"),
    "loss_types": lambda found: list(found.args.losses),
    "loss_weights": lambda found: list(found.args.losses.values()),
    "precompute_ref_logps": attrgetter("args.precompute_ref_log_probs"),
    "calculate_KL": attrgetter("args.estimates_kl"),
}


def readable(kind: Trainer) -> Trainer:
    """Give a class of trainers read-only properties with these names."""
    for name in OPTIONS:
        setattr(kind, name, property(attrgetter(f"args.{name}")))
    for name, read in OTHERS.items():
        setattr(kind, name, property(read))
    return kind


def _generation_config(use_vllm: bool, sampling: Any) -> Any:
    if use_vllm:
        return None
    from transformers import GenerationConfig  # the command line reads the tables without it

    same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        do_sample=bool(sampling.extra.get("do_sample", True)),
        eos_token_id=list(sampling.stop_ids),
        **{name: getattr(sampling, name) for name in same},
    )


# Options and arguments of earlier releases, of trainers that generate.
COMMON_OPTIONS: dict[str, str | RemovedOption] = {
    **EARLIER_ARGUMENTS,
    "vllm_sleep_enabled": "vllm_enable_sleep_mode",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    **ignored("logits never exist at once, see logits_chunk_size", "use_liger_loss"),
}
# What the first ones had in common.
FIRST_OPTIONS: dict[str, str | RemovedOption] = {
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
FIRST_ARGUMENTS: dict[str, str | RemovedOption] = {
    "config": "args",
    "reward_model": "reward_funcs",
    "policy": "model",
    **ignored("", "data_collator"),
}
