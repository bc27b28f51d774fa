"""What vLLM servers need of a trainer: its options, what they must be, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...distributed import Ranks
from ...generation.vllm.engine import check_platform
from ...generation.vllm.server.backend import VLLMServerBackend
from ...generation.vllm.server.client import VLLMClient
from ...generation.vllm.server.compat import PROTOCOL, ServerFacts, gpu_id, refusals, shape_of
from ...generation.vllm.server.server_pool import Fleet, Server
from ...imports import require
from ...models.policy_handle import PolicyHandle
from ...models.unwrap import causal_model
from ...models.weights import check_weights
from ...text import did_you_mean
from ...types import Sampling
from .online_config import OnlineConfig
from .vllm_policy import policy_of

# Options of an engine in the training process, and what `trl vllm-serve` calls them.
ELSEWHERE = {
    "vllm_tensor_parallel_size": "--tensor_parallel_size",
    "vllm_gpu_memory_utilization": "--gpu_memory_utilization",
    "vllm_max_model_length": "--max_model_len",
    "vllm_model_impl": "--vllm_model_impl",
    "vllm_enable_sleep_mode": None,
    "vllm_sync_adapter_only": None,
}


def check_options(args: OnlineConfig) -> None:
    """Check what can be known before anything is loaded.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: for an option of a colocated engine, or addresses that cannot be used.
    """
    fields = type(args).__dataclass_fields__
    for name, flag in ELSEWHERE.items():
        if name in fields and getattr(args, name) != fields[name].default:
            where = f"give {flag} to `trl vllm-serve`" if flag else "leave it out"
            raise ValueError(
                f"{name}={getattr(args, name)} is of an engine in the training process; with "
                f"vllm_mode='server' {where}."
            )
    if args.vllm_server_timeout <= 0:
        raise ValueError(f"vllm_server_timeout={args.vllm_server_timeout} must be above 0.")
    for url in addresses(args):
        VLLMClient(url, args.vllm_server_timeout)
    check_platform(False)


def addresses(args: OnlineConfig) -> list[str]:
    """The servers' addresses: those of `vllm_server_base_url`, or that of host and port.

    Raises:
        ValueError: if one is given twice.
    """
    text = args.vllm_server_base_url
    if text is None:
        host = args.vllm_server_host
        return [f"http://{f'[{host}]' if ':' in host else host}:{args.vllm_server_port}"]
    found = [url.strip() for url in text.split(",") if url.strip()]
    if not found or len(set(found)) < len(found):
        raise ValueError(
            f"vllm_server_base_url={text!r} must be an address such as http://localhost:8000, or "
            "several different ones with commas between."
        )
    return found


def make_backend(
    handle: PolicyHandle,
    args: OnlineConfig,
    sampling: Sampling,
    report: Callable[[str, float], None],
    check_prompts: Callable[[int], None],
) -> VLLMServerBackend:
    """Connect a policy with its servers; see `vllm_colocate.make_backend` for the arguments.

    Raises:
        ServerError: if a server is not ready in time, or was not started for training.
        TransferError: if weights cannot be sent.
        ValueError: for a policy for which whole weights cannot stand, or that a server does not
            fit.
    """
    ranks, fleet = handle.ranks, None
    check_weights(handle.model)
    with ranks.together("connecting with vLLM servers"):
        if ranks.rank == 0:
            fleet = connect(handle, args, sampling)
    context = _of_first(ranks, None if fleet is None else fleet.context)
    check_prompts(context)
    return VLLMServerBackend(
        fleet,
        policy_of(handle, sampling),
        context,
        handle.dtype,
        ranks=ranks,
        probe_syncs=args.vllm_probe_syncs,
        report=report,
    )


def connect(handle: PolicyHandle, args: OnlineConfig, sampling: Sampling) -> Fleet:
    """Wait for all servers, check that they fit, and meet their workers."""
    wanted = wanted_facts(handle, args)
    servers = [Server.connect(url, args.vllm_server_timeout) for url in addresses(args)]
    for server in servers:
        check_fit(server, wanted)
        check_sampling(server, sampling)
    fleet = Fleet(servers)
    fleet.meet(args.vllm_group_port, handle.device)
    return fleet


def wanted_facts(handle: PolicyHandle, args: OnlineConfig) -> ServerFacts:
    """What a server must be."""
    return ServerFacts(
        protocol=PROTOCOL,
        vllm=require("vllm", "use_vllm=True").__version__,
        shape=shape_of(causal_model(handle.model).config),
        dtype=str(handle.dtype).removeprefix("torch."),
        context=(args.max_completion_length or 0) + 1,
        logprobs_mode="processed_logprobs",
        workers=1,
        gpu=gpu_id(handle.device),
    )


def check_fit(server: Server, wanted: ServerFacts) -> None:
    """Refuse a server with which a policy cannot be trained.

    Raises:
        ValueError: with the first reason.
    """
    for reason in refusals(server.facts, wanted):
        raise ValueError(f"The vLLM server {server.client.url} cannot be used. {reason}")


def check_sampling(server: Server, sampling: Sampling) -> None:
    """Refuse options that a server would not read; it takes any.

    Raises:
        ValueError: naming the option.
    """
    legal = server.sampling_fields() if sampling.extra else set()
    for name in set(sampling.extra) - legal - {"do_sample"}:
        raise ValueError(
            f"generation_kwargs[{name!r}] cannot be asked of a vLLM server."
            f"{did_you_mean(name, legal)}"
        )


def _of_first(ranks: Ranks, value: Any) -> Any:
    return ranks.gather_objects(value)[0]
