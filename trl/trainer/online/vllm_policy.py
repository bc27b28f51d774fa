"""What vLLM reads of a run, wherever the engine runs: sampling and policy."""

from __future__ import annotations

from ...generation.vllm.backend import Policy
from ...generation.vllm.engine import sampling_fields
from ...generation.vllm.sampling import merge_options
from ...models.policy_handle import PolicyHandle
from ...models.weights import full_weights
from ...types import Sampling
from .online_config import OnlineConfig


def settle_sampling(args: OnlineConfig, sampling: Sampling) -> Sampling:
    """Sampling as the engine takes it.

    Raises:
        ValueError: for an option in `generation_kwargs` that vLLM does not know.
    """
    extra = dict(sampling.extra)
    if args.vllm_structured_outputs_regex is not None:
        extra["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return merge_options(sampling.replace(extra=extra), sampling_fields())


def policy_of(handle: PolicyHandle, sampling: Sampling) -> Policy:
    """What the backend reads of a policy, whatever wraps it by then."""

    def stamp() -> int:
        return sum(p._version for p in handle.model.parameters())

    return Policy(
        weights=lambda: full_weights(handle.model),
        stamp=stamp,
        logps=handle.logps,
        temperature=lambda: sampling.temperature,
    )
