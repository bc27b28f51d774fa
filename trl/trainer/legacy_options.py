"""Options and arguments of earlier Hugging Face TRL releases, of trainers that generate."""

from .base.keyword_arguments import EARLIER_ARGUMENTS, RemovedOption, ignored, refused

ONLINE_LEGACY_OPTIONS: dict[str, str | RemovedOption] = {
    **EARLIER_ARGUMENTS,
    "vllm_sleep_enabled": "vllm_enable_sleep_mode",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    **ignored("logits never exist at once, see logits_chunk_size", "use_liger_loss"),
}

# The first releases of RLOO and PPO shared these options and arguments.
RLOO_AND_PPO_LEGACY_OPTIONS: dict[str, str | RemovedOption] = {
    **ONLINE_LEGACY_OPTIONS,
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
        "local_batch_size",
        "micro_batch_size",
        "mini_batch_size",
        "local_mini_batch_size",
    ),
    **refused("use generation_batch_size", "batch_size"),
    **refused("use max_steps", "num_total_batches"),
}
RLOO_AND_PPO_LEGACY_ARGUMENTS: dict[str, str | RemovedOption] = {
    "config": "args",
    "reward_model": "reward_funcs",
    "policy": "model",
    **ignored("", "data_collator"),
}
