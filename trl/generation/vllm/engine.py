"""A vLLM engine in the training process: how it is started, and what can be done with it."""

import copy
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...distributed import Ranks, without_zero3_init
from ...imports import major_minor, require
from ...ops.matmul_precision import matmul_precision_kept
from ...random_numbers import preserve_rng_state
from ..base import Sampling
from .internals import keep_process_groups, renamed_shared_memory, switch_off_repacking
from .sampling import Request, parameters

logger = logging.get_logger(__name__)

OLDEST, NEWEST = "0.26", "0.33"  # releases this module is written for
CPU_BLOCK = 32  # tokens; vLLM's default of 128 would share few prompts
PARTS = ("weights", "kv_cache")
# With what `vllm.LLM` is made, whatever the options are.
FIXED = {
    "load_format": "dummy",  # the policy's own weights follow
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
}


def check_platform(sleeps: bool) -> None:
    """Check vLLM itself, and whether it can sleep if it is to, before anything is loaded."""
    vllm = require("vllm", "use_vllm=True")
    oldest, found, newest = map(major_minor, (OLDEST, vllm.__version__, NEWEST))
    if not oldest <= found <= newest:
        logger.warning_once(
            f"vLLM {vllm.__version__} is outside the supported range {OLDEST} to {NEWEST}; "
            "generation may fail or give different results."
        )
    platform = require("vllm.platforms", "use_vllm=True").current_platform
    if sleeps and not platform.is_sleep_mode_available():
        raise ValueError(
            "vllm_enable_sleep_mode=True: vLLM has no sleep mode on this platform "
            f"({platform.device_type}); leave the option out."
        )


class VLLMEngine:
    """What the colocated backend does with vLLM's `LLM`; knows which parts of it are awake."""

    def __init__(self, llm: Any, sleeps: bool = False):
        self._llm = llm
        self._sleeps = sleeps
        self._awake = set(PARTS)
        self.context: int = llm.model_config.max_model_len
        self.dtype: torch.dtype = llm.model_config.dtype
        self.model: nn.Module = llm.apply_model(lambda model: model)[0]
        self.on_cpu = next(self.model.parameters()).device.type == "cpu"

    def wake(self, part: str) -> None:
        """Give memory to the weights or to the cache, unless they have it."""
        if part not in self._awake:
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=[part])
            self._awake.add(part)

    def sleep(self) -> bool:
        """Drop weights and cache, if the engine is one that sleeps; whether it is."""
        if self._sleeps and self._awake:
            self._llm.sleep(level=2)
            self._awake.clear()
        return self._sleeps

    def load(self, name: str, weight: Tensor) -> None:
        """Write one weight, under the name it has in a checkpoint, in place."""
        self.model.load_weights([(name, weight)])

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts, which were computed with other weights."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are still running.")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Any]:
        """Complete all requests; returns vLLM's `RequestOutput`s in their order."""
        prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
        wanted = [_sampling_params(sampling, request) for request in requests]
        with unchanged_process(), _uncompiled(self.on_cpu):
            try:
                return self._llm.generate(
                    prompts, wanted, use_tqdm=False, lora_request=self._adapter()
                )
            except torch.OutOfMemoryError as error:
                # Fewer requests would not help: the engine bounds what it computes by itself.
                raise RuntimeError(
                    "The vLLM engine ran out of memory. Lower vllm_gpu_memory_utilization, or set "
                    "vllm_enable_sleep_mode=True."
                ) from error
            finally:
                # After an error or an interrupt, requests must not go on in the next call.
                engine = self._llm.llm_engine
                if engine.has_unfinished_requests():
                    with suppress(KeyError):
                        names = list(engine.output_processor.request_states)
                        engine.abort_request(names, internal=True)

    def _adapter(self) -> Any:
        """The `LoRARequest` of what is applied to the weights, if anything is."""


def _sampling_params(sampling: Sampling, request: Request) -> Any:
    module = require("vllm.sampling_params", "use_vllm=True")
    arguments = parameters(sampling, request.count, request.seed)
    structure = arguments.pop("structured_outputs", None)
    if isinstance(structure, dict):
        structure = module.StructuredOutputsParams(**structure)
    return module.SamplingParams(**arguments, structured_outputs=structure)


def sampling_fields() -> tuple[str, ...]:
    """Names of all options of vLLM's `SamplingParams`."""
    found = require("vllm.sampling_params", "use_vllm=True").SamplingParams.__struct_fields__
    return tuple(name for name in found if not name.startswith("_"))


def start_engine(
    model: Any,
    tokenizer: Any,
    arguments: Mapping[str, Any],
    ranks: Ranks,
    kind: type[VLLMEngine] = VLLMEngine,
) -> VLLMEngine:
    """Start an engine for a policy, of which only the configuration is read.

    Its weights are random until they are loaded. `arguments` of `vllm.LLM` go with those of `FIXED`
    and of the platform; `kind` is what wraps it.
    """
    with unchanged_process(), tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are loaded from this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of a tokenizer not needed
        os.environ.setdefault("LOCAL_RANK", "0")
        vllm = require("vllm", "use_vllm=True")
        on_cpu = keep_weights_unpacked("use_vllm=True")
        config = copy.deepcopy(model.config)
        config.architectures = config.architectures or [type(model).__name__]
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the engine holds whole weights
        config.save_pretrained(folder)
        if not arguments["skip_tokenizer_init"]:
            tokenizer.save_pretrained(folder)
        size = arguments.get("tensor_parallel_size", 1)
        place: dict[str, Any] = {"enforce_eager": True, "block_size": CPU_BLOCK} if on_cpu else {}
        place["distributed_executor_backend"] = "external_launcher" if ranks.count > 1 else "uni"
        place["seed"] = ranks.rank // size
        own = _own_memory() if on_cpu and size > 1 else nullcontext()
        with _uncompiled(on_cpu), without_zero3_init(), own:
            llm = vllm.LLM(folder, **FIXED, **place, **arguments)
    keep_process_groups(llm.llm_engine.engine_core, "use_vllm=True")
    return kind(llm, arguments.get("enable_sleep_mode", False))


@contextmanager
def _own_memory() -> Iterator[None]:
    """Name what ranks on a CPU share after the run; files are removed once all have opened them."""
    run = [uuid.uuid4().hex]
    torch.distributed.broadcast_object_list(run, 0)
    names = set()

    def own_name(name: str) -> str:
        names.add(own := f"{run[0]}{name.lstrip('/')}")
        return own

    try:
        with renamed_shared_memory(own_name, "use_vllm=True"):
            yield
    finally:
        for file in Path("/dev/shm").iterdir():
            if file.name.startswith(tuple(names)):
                file.unlink(missing_ok=True)


def keep_weights_unpacked(feature: str) -> bool:
    """On a CPU, keep vLLM from repacking weights, as loading misses the copies; True on a CPU."""
    on_cpu = bool(require("vllm.platforms", feature).current_platform.is_cpu())
    if on_cpu:
        switch_off_repacking(feature)
    return on_cpu


def _uncompiled(on_cpu: bool) -> AbstractContextManager[Any]:
    """On a CPU compiling vLLM's small functions takes a minute and saves nothing."""
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Give back what vLLM changes for the whole process: the global random streams, the number of
    threads and the function that sets it, the precision of products, and environment variables.
    """
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    environment = dict(os.environ)
    with preserve_rng_state(), matmul_precision_kept():
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            set_threads(threads)
            for name in set(os.environ) - set(environment):
                if not name.startswith("VLLM_"):  # vLLM reads its own ones again later
                    del os.environ[name]
            os.environ.update(environment)
