"""Read-only properties that scripts and callbacks for Hugging Face TRL read from trainers.

There, trainers copy options such as `beta` to attributes of the same name. Here these attributes
are properties, so an option has one value, that of `trainer.args`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..models.reference import FrozenCopy
from ..online.reward_sources import FunctionReward

if TYPE_CHECKING:
    from .base.base_trainer import BaseTrainer
    from .online.online_trainer import OnlineTrainer

TrainerClass = TypeVar("TrainerClass", bound=type)

# Options that trainers have as properties; an option that `args` lacks is an AttributeError.
ONLINE_OPTIONS = (
    "beta",
    "importance_sampling_level",
    "log_completions",
    "log_multimodal",
    "log_unique_prompts",
    "loss_type",
    "mask_truncated_completions",
    "max_completion_length",
    "max_tool_calling_iterations",
    "min_p",
    "multi_objective_aggregation",
    "normalize_advantages",
    "num_completions_to_print",
    "num_generations",
    "num_iterations",
    "off_policy_mask_threshold",
    "pad_to_multiple_of",
    "repetition_penalty",
    "reward_clip_range",
    "scale_rewards",
    "shuffle_dataset",
    "temperature",
    "top_entropy_quantile",
    "top_k",
    "top_p",
    "use_adaptive_entropy",
    "use_transformers_continuous_batching",
    "use_vllm",
    "vllm_gpu_memory_utilization",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_mode",
    "vllm_tensor_parallel_size",
)
OFFLINE_OPTIONS = (
    "completion_only_loss",
    "loss_type",
    "pad_to_multiple_of",
    "padding_free",
    "shuffle_dataset",
)
PREFERENCE_OPTIONS = (
    "beta",
    "desirable_weight",
    "f_alpha_divergence_coef",
    "f_divergence_type",
    "label_smoothing",
    "ld_alpha",
    "max_completion_length",
    "undesirable_weight",
    "use_weighting",
)


def reference_model(trainer: "BaseTrainer") -> nn.Module | None:
    """Return the separate reference model; None if the policy's base weights are the reference."""
    reference = trainer.reference
    return reference.model if isinstance(reference, FrozenCopy) else None


def generation_config(trainer: "OnlineTrainer") -> GenerationConfig | None:
    """Return how completions are drawn, for `model.generate`; None if vLLM generates them."""
    if trainer.args.use_vllm:
        return None
    sampling = trainer.sampling
    return GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        do_sample=bool(sampling.extra.get("do_sample", True)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(sampling.stop_ids),
    )


def reward_functions(trainer: "OnlineTrainer") -> list[Callable[..., Any] | nn.Module]:
    """Return the functions and models that give the rewards."""
    return [
        source.function if isinstance(source, FunctionReward) else source.model
        for source in trainer.rewards.sources
    ]


def reward_tokenizers(trainer: "OnlineTrainer") -> list[PreTrainedTokenizerBase | None]:
    """Return the tokenizer of each reward model, and None for each reward function."""
    return [
        None if isinstance(source, FunctionReward) else source.tokenizer
        for source in trainer.rewards.sources
    ]


def tools(trainer: "OnlineTrainer") -> list[Callable[..., Any]]:
    """Return the functions that completions may call."""
    runner = trainer.agents.tools
    return list(runner.by_name.values()) if runner else []


# Other properties, and the functions that compute them from a trainer.
COMMON_PROPERTIES: dict[str, Callable[[Any], object]] = {
    "aux_loss_enabled": lambda trainer: trainer.router_coefficient != 0.0,
    "ref_model": reference_model,
    "router_aux_loss_coef": lambda trainer: trainer.router_coefficient,
}
ONLINE_PROPERTIES: dict[str, Callable[[Any], object]] = {
    **COMMON_PROPERTIES,
    "chat_template_kwargs": lambda trainer: trainer.args.chat_template_kwargs or {},
    "continuous_batching_config": (
        lambda trainer: trainer.args.transformers_continuous_batching_config
    ),
    "entropy_coef": lambda trainer: trainer.entropy.coefficient,
    "eos_token_ids": lambda trainer: list(trainer.sampling.stop_ids),
    "epsilon_high": lambda trainer: trainer.args.clip_range[1],
    "epsilon_low": lambda trainer: trainer.args.clip_range[0],
    "generation_config": generation_config,
    "generation_kwargs": lambda trainer: trainer.args.generation_kwargs or {},
    "num_generations_eval": lambda trainer: trainer.args.group_size_in("eval"),
    "reward_func_names": lambda trainer: [source.name for source in trainer.rewards.sources],
    "reward_funcs": reward_functions,
    "reward_processing_classes": reward_tokenizers,
    "reward_weights": lambda trainer: trainer.rewards.weights,
    "rollout_func": lambda trainer: trainer.agents.rollout_func,
    "tools": tools,
}
PREFERENCE_PROPERTIES: dict[str, Callable[[Any], object]] = {
    "calculate_KL": lambda trainer: trainer.args.estimates_kl,
    "loss_types": lambda trainer: list(trainer.args.losses),
    "loss_weights": lambda trainer: list(trainer.args.losses.values()),
    "precompute_ref_logps": lambda trainer: trainer.args.precompute_ref_log_probs,
}


def add_trl_properties(
    options: Iterable[str], computed: Mapping[str, Callable[[Any], object]]
) -> Callable[[TrainerClass], TrainerClass]:
    """Return a class decorator that adds read-only properties to a class of trainers.

    Args:
        options: names of options; a property of this name reads `trainer.args`.
        computed: for each other property, a function that computes it from the trainer.
    """

    def add_properties(trainer_class: TrainerClass) -> TrainerClass:
        getters = {name: _option_getter(name) for name in options}
        for name, getter in (getters | dict(computed)).items():
            setattr(trainer_class, name, property(getter))
        return trainer_class

    return add_properties


def _option_getter(name: str) -> Callable[[Any], object]:
    return lambda trainer: getattr(trainer.args, name)
