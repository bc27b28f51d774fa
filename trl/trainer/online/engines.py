"""Choosing the engine that generates: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from ...distributed import Ranks
from ...generation.base import GenerationBackend
from ...models.policy_handle import PolicyHandle
from ...models.quantized import working_precision
from ...models.unwrap import causal_model, policy_for_inference
from ...types import Sampling
from .online_config import OnlineConfig

if TYPE_CHECKING:
    from ...generation.transformers.backend import Attempt


def check_engine(args: OnlineConfig) -> None:
    """Check the engine's options, before anything is loaded.

    Raises:
        ImportError: if the engine is not installed.
        ValueError: for options that contradict each other or the platform.
    """
    if args.use_vllm:
        from .vllm_engines import check_options  # imported only where it is used

        check_options(args)


def sampling_for(args: OnlineConfig, stop_ids: tuple[int, ...]) -> Sampling:
    """How the engine draws: `generation_kwargs` win over the named options.

    Raises:
        ValueError: for an option in `generation_kwargs` that the engine does not know.
    """
    extra: Any = args.generation_kwargs or {}
    sampling = Sampling(
        max_tokens=args.max_completion_length or 0,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_ids=stop_ids,
        extra=extra,
    )
    if args.use_vllm:
        from .vllm_engines import settle_sampling

        return settle_sampling(args, sampling)
    from ...generation.transformers.backend import merge_options

    return merge_options(sampling)


def handle_of(
    current: Callable[[], Any],
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    args: OnlineConfig,
    logps: Callable[[list[int], list[int]], list[float]],
) -> PolicyHandle:
    """Describe a policy to engines; see `PolicyHandle` for the arguments."""
    ranks = Ranks(accelerator)
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    if not (args.bf16 or args.fp16):
        dtype = working_precision(causal_model(current()))
    in_step = ranks.share_weights and not args.ds3_gather_for_generation
    return PolicyHandle(
        current=current,
        tokenizer=tokenizer,
        ranks=ranks,
        device=args.device,
        dtype=dtype,
        logps=logps,
        inference=lambda: policy_for_inference(current(), accelerator, at_once=not in_step),
        layers_in_step=in_step,
    )


def make_engine(
    policy: PolicyHandle,
    args: OnlineConfig,
    sampling: Sampling,
    *,
    report: Callable[[str, float], None],
    check_prompts: Callable[[int], None],
    attempt: Attempt,
) -> GenerationBackend:
    """Make the engine that the options ask for.

    Args:
        policy (`PolicyHandle`): what generates.
        args (`OnlineConfig`): options.
        sampling (`Sampling`): how it draws, from `sampling_for`.
        report: takes the name and value of a metric.
        check_prompts: refuses prompts too long for an engine that sees so many tokens.
        attempt: runs generation, in pieces if it does not fit; see `TransformersBackend`.

    Raises:
        ValueError: for options that the engine cannot honor.
    """
    if args.use_vllm:
        from .vllm_engines import make_backend

        return make_backend(policy, args, sampling, report, check_prompts)
    if args.use_transformers_continuous_batching:
        return _make_continuous(policy, args)
    from ...generation.transformers.backend import TransformersBackend
    from ...generation.transformers.batch_limits import BatchLimits

    return TransformersBackend(
        policy.inference,
        pad_id=policy.tokenizer.pad_token_id,
        device=policy.device,
        tokenizer=policy.tokenizer,
        cache_implementation=args.cache_implementation,
        shared_prefix=args.shared_prefix,
        chunk=args.logits_chunk_size,
        limits=BatchLimits(args.generation_max_rows, args.generation_max_kv_bytes),
        ranks=policy.ranks,
        in_step=policy.layers_in_step,
        attempt=attempt,
    )


def _make_continuous(policy: PolicyHandle, args: OnlineConfig) -> GenerationBackend:
    from ...generation.transformers.continuous import ContinuousBackend

    others = {
        "cache_implementation": args.cache_implementation is not None,
        "generation_max_rows": args.generation_max_rows is not None,
        "generation_max_kv_gb": args.generation_max_kv_gb is not None,
        "ds3_gather_for_generation=False": policy.layers_in_step,
    }
    refused = [name for name, is_set in others.items() if is_set]
    if refused:
        raise ValueError(
            f"use_transformers_continuous_batching=True cannot be used with {', '.join(refused)}; "
            "transformers_continuous_batching_config says how its cache is bounded."
        )
    options: Any = args.transformers_continuous_batching_config
    return ContinuousBackend(
        policy.inference,
        pad_id=policy.tokenizer.pad_token_id,
        options=options,
        ranks=policy.ranks,
    )
