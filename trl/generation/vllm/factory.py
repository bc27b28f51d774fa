"""Making vLLM engines for a run: options, and the size of an engine beside training."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from ...imports import require
from ...memory.meter import DeviceMemory, device_bytes
from ...memory.model_size import model_size, quantized_bytes
from ...memory.plan import BATCHED_TOKENS, Engine, EngineMemory, Plan
from ...memory.settings import ASSUMED_PROMPT, RunSettings, options_of_environment, read_sharding
from ...models.loading import context_length
from ...models.unwrap import VALUE_MODEL, causal_model, is_peft_model
from ...models.weights import check_weights
from ...options import changed_options
from ..base import PolicyHandle, Sampling
from .adapter_engine import AdapterBackend, AdapterEngine, adapter_arguments
from .backend import VLLMBackend, VLLMColocateBackend
from .engine import VLLMEngine, check_platform, start_engine
from .sampling import needs_detokenizer
from .server.backend import Server, ServerPool, VLLMServerBackend
from .server.client import PROTOCOL, ServerFacts, VLLMClient, gpu_id, model_shape

if TYPE_CHECKING:
    from ...trainer.online.online_config import OnlineConfig

logger = logging.get_logger(__name__)

MOST_ROWS = 1024  # completions that decode together; vLLM lets the others wait
# Options of an engine in the training process, and what `trl vllm-serve` calls them.
SERVER_FLAGS = {
    "vllm_tensor_parallel_size": "--tensor_parallel_size",
    "vllm_gpu_memory_utilization": "--gpu_memory_utilization",
    "vllm_max_model_length": "--max_model_len",
    "vllm_model_impl": "--vllm_model_impl",
    "vllm_enable_sleep_mode": None,
    "vllm_sync_adapter_only": None,
}


def check_options(args: "OnlineConfig") -> None:
    """Check what can be known before anything is loaded."""
    if args.vllm_mode == "server":
        for name in changed_options(args, SERVER_FLAGS):
            flag = SERVER_FLAGS[name]
            where = f"give {flag} to `trl vllm-serve`" if flag else "leave it out"
            raise ValueError(
                f"{name}={getattr(args, name)} is for an engine in the training process; with "
                f"vllm_mode='server' {where}."
            )
        server_urls(args)
        check_platform(False)
        return
    size, ranks = args.vllm_tensor_parallel_size, args.world_size
    if ranks % size:
        legal = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"vllm_tensor_parallel_size={size} must divide the number of processes, which is "
            f"{ranks}: choose {' or '.join(legal)}."
        )
    if args.vllm_max_model_length is not None:
        check_engine_context(args, args.vllm_max_model_length)
    check_platform(args.vllm_enable_sleep_mode)


def check_engine_context(
    args: "OnlineConfig", context: int, longest: tuple[int, int] = (0, 0)
) -> None:
    """Check that a vLLM engine has room for a token after the `longest` prompt (tokens, row)."""
    completion, (length, row) = args.max_completion_length, longest
    if context <= completion:
        raise ValueError(
            f"The vLLM engine sees {context} tokens, but max_completion_length={completion} leaves "
            f"no room for a prompt: set vllm_max_model_length to {completion} plus the longest "
            f"prompt, or max_completion_length below {context}."
        )
    words = (
        f"The prompt of row {row} of train_dataset has {length} tokens. With "
        f"max_completion_length={completion}, that exceeds the {context} that the vLLM engine "
        "sees"
    )
    if length >= context:
        raise ValueError(
            f"{words}, and leaves no room for a completion: raise vllm_max_model_length (of a "
            "server: --max_model_len) or leave out such prompts."
        )
    if length + completion > context:
        logger.warning(f"{words}: its completions are cut short.")


def server_urls(args: "OnlineConfig") -> list[str]:
    """Addresses of the servers: those of `vllm_server_base_url`, or that of host and port."""
    host, given = args.vllm_server_host, args.vllm_server_base_url
    address = f"http://{f'[{host}]' if ':' in host else host}:{args.vllm_server_port}"
    urls = [url.strip() for url in (given or address).split(",") if url.strip()]
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(
            f"vllm_server_base_url={given!r} must be an address such as http://localhost:8000, or "
            "several different ones with commas between."
        )
    for url in urls:
        VLLMClient(url, args.vllm_server_timeout)
    return urls


def make_backend(
    handle: PolicyHandle,
    args: "OnlineConfig",
    sampling: Sampling,
    report: Callable[[str, float], None],
    longest: Mapping[str, tuple[int, int]],
) -> VLLMBackend:
    """Start an engine for a policy, or connect it with servers (else, a `ServerError`)."""
    check_weights(handle.model)
    prompt = longest.get("train_dataset", (0, 0))
    shared: dict[str, Any] = {"probe_syncs": args.vllm_probe_syncs, "report": report}
    shared["temperature"] = sampling.temperature
    if args.vllm_mode == "server":
        found = VLLMServerBackend(_connect(handle, args, sampling), handle, **shared)
        check_engine_context(args, found.context, prompt)
        return found
    arguments = engine_arguments(handle, args, sampling)
    check_engine_context(args, arguments["max_model_len"], prompt)
    kinds: tuple[Any, Any] = (VLLMEngine, VLLMColocateBackend)
    if args.vllm_sync_adapter_only:
        arguments |= adapter_arguments(handle, arguments["dtype"])
        kinds = (AdapterEngine, AdapterBackend)
    model = causal_model(handle.model)
    engine = start_engine(model, handle.tokenizer, arguments, handle.ranks, kinds[0])
    handle.ranks.wait()
    shared["tensor_parallel"] = args.vllm_tensor_parallel_size
    return kinds[1](engine, handle, **shared)


def _connect(handle: PolicyHandle, args: "OnlineConfig", sampling: Sampling) -> ServerPool | None:
    """Servers that fit and whose workers were met, on rank 0."""
    pool = None
    with handle.ranks.fail_together("connecting with vLLM servers"):
        if handle.ranks.rank == 0:
            wanted = ServerFacts(
                protocol=PROTOCOL,
                vllm=require("vllm", "use_vllm=True").__version__,
                shape=model_shape(causal_model(handle.model).config),
                dtype=str(handle.dtype).removeprefix("torch."),
                context=args.max_completion_length + 1,
                logprobs_mode="processed_logprobs",
                workers=1,
                gpu=gpu_id(handle.device),
            )
            pool = ServerPool([Server(url, args.vllm_server_timeout) for url in server_urls(args)])
            for server in pool.servers:
                server.check(wanted, sampling)
            pool.join(handle.device)
    return pool


def engine_arguments(
    handle: PolicyHandle, args: "OnlineConfig", sampling: Sampling
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: what the options say, else what training leaves of the device."""
    causal, dtype = causal_model(handle.model), handle.dtype
    context = args.vllm_max_model_length or context_length(causal)
    if context is None:
        raise ValueError(
            "The model's configuration does not say how many tokens it sees: set "
            "vllm_max_model_length."
        )
    share, cache = args.vllm_gpu_memory_utilization, {}
    if share is None:
        # What is free where least is: engines of several ranks must be of one size.
        found, least = DeviceMemory.of(handle.device), handle.ranks.max
        free = DeviceMemory(free=-least(-found.free), held=-least(-found.held))
        memory = engine_memory(args, handle.model, dtype, context, free)
        if memory.context < context:
            logger.info(f"The vLLM engine has room for {memory.context} tokens of context.")
        context, cache = memory.context, {"kv_cache_memory_bytes": memory.cache}
        share = min(0.95, memory.total / device_bytes(args.device))
    return cache | {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": context,  # most tokens of a prompt with its completion
        "max_num_seqs": max_concurrent_rows(args),
        "max_num_batched_tokens": max(BATCHED_TOKENS, max_concurrent_rows(args)),
        "gpu_memory_utilization": share,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "enable_sleep_mode": args.vllm_enable_sleep_mode,
        "skip_tokenizer_init": not needs_detokenizer(sampling),
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
    }


def max_concurrent_rows(args: "OnlineConfig") -> int:
    """Completions that decode together: those of a round, on all ranks that share an engine."""
    rows = max(args.batch_plan.rows_per_rank, args.eval_rows) * args.vllm_tensor_parallel_size
    return min(MOST_ROWS, rows)


def engine_memory(
    args: "OnlineConfig",
    model: Any,
    dtype: torch.dtype,
    context: int,
    measured: DeviceMemory | None = None,
) -> EngineMemory:
    """What an engine of some type and context is given beside training; see `Engine.memory`."""
    causal, adapter = causal_model(model), None
    # Of adapters of other kinds than those with a start the whole model counts as trained.
    if is_peft_model(model) and hasattr(model.active_peft_config, "init_lora_weights"):
        # As large, with a start that is not computed from weights that are not there.
        changes = {"init_lora_weights": True, "inference_mode": False}
        adapter = replace(model.active_peft_config, **changes)
    values = getattr(getattr(causal, VALUE_MODEL, None), "config", None)
    run = RunSettings.of(
        args,
        value_model=None if values is None else model_size(values, classifies=True),
        prompt=max(1, min(ASSUMED_PROMPT, context - args.max_completion_length)),
        on_cpu=args.device.type == "cpu",
        sharding=read_sharding(options_of_environment(os.environ)),
        weight_bytes=causal.dtype.itemsize,
        matrix_bytes=quantized_bytes(getattr(causal.config, "quantization_config", None)),
        product_bytes=dtype.itemsize,
    )
    size = model_size(causal.config, adapter, args.trust_remote_code)
    plan, ranks = Plan(size, run, device_bytes(args.device)), args.vllm_tensor_parallel_size
    engine = Engine(plan, ranks, context, max_concurrent_rows(args), args.vllm_enable_sleep_mode)
    return engine.memory(run.completion + 1, measured)
