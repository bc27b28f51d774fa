"""Choose and make the generation engine of a run. Only this module knows all engines."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from .base import Sampling

if TYPE_CHECKING:
    from ..trainer.online.online_config import OnlineConfig
    from .base import GenerationBackend, PolicyHandle
    from .transformers.backend import OomRetry

# Engines are imported inside the functions: a run uses one of them.


def make_sampling(args: "OnlineConfig", stop_ids: tuple[int, ...]) -> Sampling:
    """Return how the engine samples. `generation_kwargs` override the named options.

    ValueError: the engine does not have an option in `generation_kwargs`.
    """
    extra = dict(cast("dict[str, Any] | None", args.generation_kwargs) or {})
    if args.vllm_structured_outputs_regex is not None and args.use_vllm:
        extra["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    sampling = Sampling(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=cast(int, args.top_k),
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_ids=stop_ids,
        extra=extra,
    )
    if args.use_vllm:
        from .vllm.engine import sampling_fields
        from .vllm.sampling import merge_options as merge_vllm_options

        return merge_vllm_options(sampling, sampling_fields())
    from .transformers.backend import merge_options

    return merge_options(sampling)


def make_engine(
    policy: "PolicyHandle",
    args: "OnlineConfig",
    sampling: Sampling,
    *,
    longest_prompts: Mapping[str, tuple[int, int]],
    oom_retry: "OomRetry",
) -> "GenerationBackend":
    """Make the engine that the options choose.

    `longest_prompts` maps the name of each dataset to the length of its longest prompt in tokens
    and the row of that prompt. `oom_retry` generates a batch in smaller chunks if it does not fit
    into memory.
    """
    if args.use_vllm:
        from .vllm.factory import make_backend

        return make_backend(policy, args, sampling, longest_prompts)
    pad_id = policy.tokenizer.pad_token_id
    if args.use_transformers_continuous_batching:
        from .transformers.continuous import ContinuousBackend

        _check_continuous_batching(args, policy.layers_in_lockstep)
        return ContinuousBackend(
            policy.inference,
            pad_id=pad_id,
            options=cast("dict[str, Any] | None", args.transformers_continuous_batching_config),
            ranks=policy.ranks,
        )
    from .transformers.backend import TransformersBackend

    max_cache_gb = args.generation_max_kv_gb
    return TransformersBackend(
        policy.inference,
        pad_id=pad_id,
        device=policy.device,
        tokenizer=policy.tokenizer,
        cache_implementation=args.cache_implementation,
        shared_prefix=args.shared_prefix,
        logits_chunk_size=args.logits_chunk_size,
        max_rows=args.generation_max_rows,
        max_cache_bytes=None if max_cache_gb is None else max_cache_gb * 1e9,
        ranks=policy.ranks,
        layers_in_lockstep=policy.layers_in_lockstep,
        oom_retry=oom_retry,
    )


def _check_continuous_batching(args: "OnlineConfig", layers_in_lockstep: bool) -> None:
    """Refuse options that continuous batching does not support."""
    refused = []
    if args.cache_implementation is not None:
        refused.append("cache_implementation")
    if args.generation_max_rows is not None:
        refused.append("generation_max_rows")
    if args.generation_max_kv_gb is not None:
        refused.append("generation_max_kv_gb")
    if layers_in_lockstep:
        refused.append("ds3_gather_for_generation=False")
    if refused:
        raise ValueError(
            "use_transformers_continuous_batching=True cannot be used with "
            f"{', '.join(refused)}; set the limits of its cache in "
            "transformers_continuous_batching_config."
        )
