"""Choosing what generates: the one place that knows all engines."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .base import Sampling

if TYPE_CHECKING:
    from ..trainer.online.online_config import OnlineConfig
    from .base import GenerationBackend, PolicyHandle
    from .transformers.backend import Attempt

# Engines are imported where they are made: a run uses one of them.


def sampling_for(args: "OnlineConfig", stop_ids: tuple[int, ...]) -> Sampling:
    """How the engine draws: `generation_kwargs`, which it must know, win over named options."""
    given: Any = args.generation_kwargs or {}
    extra = dict(given)
    if args.vllm_structured_outputs_regex is not None and args.use_vllm:
        extra["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    same = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    options = {name: getattr(args, name) for name in same}
    tokens = args.max_completion_length
    sampling = Sampling(max_tokens=tokens, stop_ids=stop_ids, extra=extra, **options)
    if args.use_vllm:
        from .vllm.engine import sampling_fields
        from .vllm.sampling import merge_options as merge_options_of_vllm

        return merge_options_of_vllm(sampling, sampling_fields())
    from .transformers.backend import merge_options

    return merge_options(sampling)


def make_engine(
    policy: "PolicyHandle",
    args: "OnlineConfig",
    sampling: Sampling,
    *,
    report: Callable[[str, float], None],
    longest: Mapping[str, tuple[int, int]],
    attempt: "Attempt",
) -> "GenerationBackend":
    """Make the engine of the options.

    `report` takes metrics, `attempt` runs what may not fit into memory, and `longest` has the
    longest prompt of each dataset: its tokens and its row.
    """
    if args.use_vllm:
        from .vllm.factory import make_backend

        return make_backend(policy, args, sampling, report, longest)
    pad_id = policy.tokenizer.pad_token_id
    if args.use_transformers_continuous_batching:
        from .transformers.continuous import ContinuousBackend

        names = ("cache_implementation", "generation_max_rows", "generation_max_kv_gb")
        refused = [name for name in names if getattr(args, name) is not None]
        refused += ["ds3_gather_for_generation=False"] * policy.layers_in_step
        if refused:
            raise ValueError(
                "use_transformers_continuous_batching=True cannot be used with "
                f"{', '.join(refused)}; set the limits of its cache in "
                "transformers_continuous_batching_config."
            )
        given: Any = args.transformers_continuous_batching_config
        return ContinuousBackend(policy.inference, pad_id=pad_id, options=given, ranks=policy.ranks)
    from .transformers.backend import TransformersBackend

    most_gb = args.generation_max_kv_gb
    return TransformersBackend(
        policy.inference,
        pad_id=pad_id,
        device=policy.device,
        tokenizer=policy.tokenizer,
        cache_implementation=args.cache_implementation,
        shared_prefix=args.shared_prefix,
        chunk=args.logits_chunk_size,
        rows=args.generation_max_rows,
        cache_bytes=most_gb and most_gb * 1e9,
        ranks=policy.ranks,
        in_step=policy.layers_in_step,
        attempt=attempt,
    )
