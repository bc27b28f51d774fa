"""Make the vLLM engine of a run: check options, and fit a colocated engine beside training."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging

from ...imports import require
from ...memory.engine_memory import BATCHED_TOKENS, Engine, EngineMemory
from ...memory.meter import DeviceMemory, device_bytes
from ...memory.model_size import model_size, quantized_bytes
from ...memory.plan import Plan
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

MAX_DECODED_ROWS = 1024  # completions that decode together; others wait in vLLM's queue
MAX_MEMORY_FRACTION = 0.95  # of the device, for a colocated engine
# Options of a colocated engine, and the flags of `trl vllm-serve` for the same.
SERVER_FLAGS = {
    "vllm_tensor_parallel_size": "--tensor_parallel_size",
    "vllm_gpu_memory_utilization": "--gpu_memory_utilization",
    "vllm_max_model_length": "--max_model_len",
    "vllm_model_impl": "--vllm_model_impl",
    "vllm_enable_sleep_mode": None,
    "vllm_sync_adapter_only": None,
}


def check_options(args: "OnlineConfig") -> None:
    """Check the options of vLLM, before anything is loaded."""
    if args.vllm_mode == "server":
        for name in changed_options(args, SERVER_FLAGS):
            flag = SERVER_FLAGS[name]
            advice = f"give {flag} to `trl vllm-serve`" if flag else "leave it out"
            raise ValueError(
                f"{name}={vars(args)[name]} is for an engine in the training process; with "
                f"vllm_mode='server' {advice}."
            )
        server_urls(args)
        check_platform(False)
        return
    group_size = args.vllm_tensor_parallel_size
    num_ranks = args.world_size
    if num_ranks % group_size:
        divisors = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ValueError(
            f"vllm_tensor_parallel_size={group_size} must divide the number of processes, which is "
            f"{num_ranks}: choose {' or '.join(divisors)}."
        )
    if args.vllm_max_model_length is not None:
        check_engine_context(args, args.vllm_max_model_length)
    check_platform(args.vllm_enable_sleep_mode)


def check_engine_context(
    args: "OnlineConfig", context: int, longest: tuple[int, int] = (0, 0)
) -> None:
    """Check that a context of so many tokens has room for prompts and a completion token.

    `longest` is the number of tokens of the longest prompt, and its row. A prompt that leaves less
    than max_completion_length is a warning.
    """
    max_completion = args.max_completion_length
    prompt_length, row = longest
    if context <= max_completion:
        raise ValueError(
            f"The vLLM engine has a context of {context} tokens, but "
            f"max_completion_length={max_completion} leaves no room for a prompt: set "
            f"vllm_max_model_length to {max_completion} plus the longest prompt, or "
            f"max_completion_length below {context}."
        )
    message = (
        f"The prompt of row {row} of train_dataset has {prompt_length} tokens. With "
        f"max_completion_length={max_completion}, that exceeds the vLLM engine's context of "
        f"{context} tokens"
    )
    if prompt_length >= context:
        raise ValueError(
            f"{message}, and leaves no room for a completion: raise vllm_max_model_length (of a "
            "server: --max_model_len) or leave out such prompts."
        )
    if prompt_length + max_completion > context:
        logger.warning(f"{message}: its completions will be truncated.")


def server_urls(args: "OnlineConfig") -> list[str]:
    """Return the addresses of the servers, by `vllm_server_base_url` or host and port."""
    addresses = args.vllm_server_base_url
    if not addresses:
        host = args.vllm_server_host
        if ":" in host:  # IPv6
            host = f"[{host}]"
        addresses = f"http://{host}:{args.vllm_server_port}"
    urls = [url.strip() for url in addresses.split(",") if url.strip()]
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(
            f"vllm_server_base_url={args.vllm_server_base_url!r} must be an address such as "
            "http://localhost:8000, or several different ones with commas between."
        )
    for url in urls:
        VLLMClient(url, args.vllm_server_timeout)  # raises ValueError
    return urls


def make_backend(
    policy: PolicyHandle,
    args: "OnlineConfig",
    sampling: Sampling,
    longest_prompts: Mapping[str, tuple[int, int]],
) -> VLLMBackend:
    """Start a colocated engine, or connect to servers; see `trl.generation.factory.make_engine`.

    Raises `ServerError` if a server is not ready.
    """
    check_weights(policy.model)
    longest = longest_prompts.get("train_dataset", (0, 0))
    options: dict[str, Any] = {
        "probe_syncs": args.vllm_probe_syncs,
        "temperature": sampling.temperature,
    }
    if args.vllm_mode == "server":
        backend = VLLMServerBackend(_connect(policy, args, sampling), policy, **options)
        check_engine_context(args, backend.context_length, longest)
        return backend
    options["tensor_parallel"] = args.vllm_tensor_parallel_size
    arguments = engine_arguments(policy, args, sampling)
    check_engine_context(args, arguments["max_model_len"], longest)
    engine_class: type[VLLMEngine] = VLLMEngine
    backend_class: Any = VLLMColocateBackend
    if args.vllm_sync_adapter_only:
        arguments |= adapter_arguments(policy, arguments["dtype"])
        engine_class = AdapterEngine
        backend_class = AdapterBackend
    model = causal_model(policy.model)
    engine = start_engine(model, policy.tokenizer, arguments, policy.ranks, engine_class)
    policy.ranks.wait()
    return backend_class(engine, policy, **options)


def _connect(policy: PolicyHandle, args: "OnlineConfig", sampling: Sampling) -> ServerPool | None:
    """Connect rank 0 to compatible servers and their workers; other ranks have no pool."""
    pool = None
    with policy.ranks.fail_together("connecting with vLLM servers"):
        if policy.ranks.rank == 0:
            required = ServerFacts(
                protocol=PROTOCOL,
                vllm=require("vllm", "use_vllm=True").__version__,
                shape=model_shape(causal_model(policy.model).config),
                dtype=str(policy.dtype).removeprefix("torch."),
                context=args.max_completion_length + 1,
                logprobs_mode="processed_logprobs",
                workers=1,
                gpu=gpu_id(policy.device),
            )
            pool = ServerPool([Server(url, args.vllm_server_timeout) for url in server_urls(args)])
            for server in pool.servers:
                server.check(required, sampling)
            pool.join(policy.device)
    return pool


def engine_arguments(
    policy: PolicyHandle, args: "OnlineConfig", sampling: Sampling
) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for the options.

    Where the options leave it open, the engine gets the memory that training leaves.
    """
    context = args.vllm_max_model_length or context_length(causal_model(policy.model))
    if context is None:
        raise ValueError(
            "The model's configuration has no context length: set vllm_max_model_length."
        )
    max_rows = max_concurrent_rows(args)
    arguments = {
        "dtype": str(policy.dtype).removeprefix("torch."),
        "max_model_len": context,  # maximum tokens of prompt plus completion
        "max_num_seqs": max_rows,
        "max_num_batched_tokens": max(BATCHED_TOKENS, max_rows),
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "enable_sleep_mode": args.vllm_enable_sleep_mode,
        "skip_tokenizer_init": not needs_detokenizer(sampling),
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
    }
    if args.vllm_gpu_memory_utilization is not None:
        return arguments
    memory = engine_memory(args, policy.model, policy.dtype, context, _least_free_memory(policy))
    if memory.context < context:
        logger.info(f"The vLLM engine has room for {memory.context} tokens of context.")
    fraction = memory.total / device_bytes(args.device)
    return arguments | {
        "max_model_len": memory.context,
        "kv_cache_memory_bytes": memory.cache,
        "gpu_memory_utilization": min(MAX_MEMORY_FRACTION, fraction),
    }


def _least_free_memory(policy: PolicyHandle) -> DeviceMemory:
    """Return the least memory of any rank, as all engines have the same size.

    All ranks must call it together.
    """
    own = DeviceMemory.of(policy.device)
    return DeviceMemory(
        free=-policy.ranks.max(-own.free),
        used=-policy.ranks.max(-own.used),
    )


def max_concurrent_rows(args: "OnlineConfig") -> int:
    """Return how many completions decode together: a rollout batch of all ranks of an engine."""
    rows = max(args.batch_plan.rows_per_rank, args.eval_rows) * args.vllm_tensor_parallel_size
    return min(MAX_DECODED_ROWS, rows)


def engine_memory(
    args: "OnlineConfig",
    model: nn.Module,
    dtype: torch.dtype,
    context: int,
    measured: DeviceMemory | None = None,
) -> EngineMemory:
    """Return the memory of an engine with this dtype and context; see `Engine.memory`."""
    causal = causal_model(model)
    adapter = None  # None with an adapter: all weights of the model count as trained
    if is_peft_model(model) and hasattr(model.active_peft_config, "init_lora_weights"):
        # Initial values do not change its size; some need the weights of the model, which
        # `model_size` does not load.
        adapter = replace(model.active_peft_config, init_lora_weights=True, inference_mode=False)
    value_model = dict(causal.named_children()).get(VALUE_MODEL)
    value_config = getattr(value_model, "config", None)
    run = RunSettings.of(
        args,
        value_model=None if value_config is None else model_size(value_config, classifies=True),
        prompt=max(1, min(ASSUMED_PROMPT, context - args.max_completion_length)),
        on_cpu=args.device.type == "cpu",
        sharding=read_sharding(options_of_environment(os.environ)),
        weight_bytes=causal.dtype.itemsize,
        matrix_bytes=quantized_bytes(getattr(causal.config, "quantization_config", None)),
        product_bytes=dtype.itemsize,
    )
    size = model_size(causal.config, adapter, args.trust_remote_code)
    engine = Engine(
        plan=Plan(size, run, device_bytes(args.device)),
        ranks=args.vllm_tensor_parallel_size,
        context=context,
        rows=max_concurrent_rows(args),
        sleeps=args.vllm_enable_sleep_mode,
    )
    return engine.memory(run.completion + 1, measured)
