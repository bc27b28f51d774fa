"""Choosing the engine that generates: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...generation.base import GenerationBackend
from ...generation.transformers.backend import TransformersBackend, merge_extra
from ...generation.transformers.batch_limits import Limits
from ...generation.transformers.continuous import ContinuousBackend
from ...types import Sampling
from . import vllm_colocate, vllm_server
from .online_config import OnlineConfig
from .vllm_policy import settle_sampling


@dataclass(frozen=True)
class Engine:
    """An engine before it is made.

    Args:
        check: checks the options before anything is loaded.
        settle: turns sampling as configured into what the engine takes.
        make: makes the backend of a trainer.
    """

    check: Callable[[OnlineConfig], None]
    settle: Callable[[OnlineConfig, Sampling], Sampling]
    make: Callable[[Any], GenerationBackend]


def chosen_engine(args: OnlineConfig) -> Engine:
    """The engine that the options ask for."""
    if args.use_vllm:
        module = vllm_server if args.vllm_mode == "server" else vllm_colocate
        return Engine(module.check_options, settle_sampling, module.make_backend)
    if args.use_transformers_continuous_batching:
        return Engine(_accept, _settle_transformers, _make_continuous)
    return Engine(_accept, _settle_transformers, _make_transformers)


def _accept(args: OnlineConfig) -> None:
    """There is nothing to check before the policy is loaded."""


def _settle_transformers(args: OnlineConfig, sampling: Sampling) -> Sampling:
    merged, rest = merge_extra(sampling)
    return merged.replace(extra=rest)


def make_engine(trainer: Any) -> GenerationBackend:
    """Make the engine that the options of a trainer ask for.

    Args:
        trainer (`OnlineTrainer`): whose policy generates.

    Raises:
        ValueError: for options that the engine cannot honor.
    """
    return chosen_engine(trainer.args).make(trainer)


def _make_continuous(trainer: Any) -> ContinuousBackend:
    _check_continuous(trainer)
    return ContinuousBackend(
        trainer._policy_for_inference,
        pad_id=trainer.processing_class.pad_token_id,
        options=trainer.args.transformers_continuous_batching_config,
        ranks=trainer.ranks,
    )


def _make_transformers(trainer: Any) -> TransformersBackend:
    args = trainer.args
    return TransformersBackend(
        trainer._policy_for_inference,
        pad_id=trainer.processing_class.pad_token_id,
        device=args.device,
        cache_implementation=args.cache_implementation,
        shared_prefix=args.shared_prefix,
        chunk=args.logits_chunk_size,
        limits=Limits(args.generation_max_rows, args.generation_max_kv_bytes),
        ranks=trainer.ranks,
        in_step=trainer.phases.layers_are_shared,
        attempt=trainer.phases.generation.run,
    )


def _check_continuous(trainer: Any) -> None:
    args = trainer.args
    others = {
        "cache_implementation": args.cache_implementation is not None,
        "generation_max_rows": args.generation_max_rows is not None,
        "generation_max_kv_gb": args.generation_max_kv_gb is not None,
        "ds3_gather_for_generation=False": trainer.phases.layers_are_shared,
    }
    refused = [name for name, is_set in others.items() if is_set]
    if refused:
        raise ValueError(
            f"use_transformers_continuous_batching=True cannot be used with {', '.join(refused)}; "
            "transformers_continuous_batching_config says how its cache is bounded."
        )
