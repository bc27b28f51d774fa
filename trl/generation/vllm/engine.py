"""A vLLM engine in the training process: how it starts, and what the backend does with it."""

import copy
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...distributed import Ranks, without_zero3_init
from ...imports import major_minor, require
from ...memory.random_numbers import preserve_rng_state
from ...ops.matmul_precision import matmul_precision_kept
from ..base import Sampling
from .internals import keep_process_groups, renamed_shared_memory, switch_off_repacking
from .sampling import CompletionRequest, sampling_arguments

logger = logging.get_logger(__name__)

# The releases of vLLM this module is written for.
OLDEST_RELEASE = "0.26"
NEWEST_RELEASE = "0.33"
CPU_BLOCK_SIZE = 32  # tokens; with vLLM's default of 128, few prompts would share blocks
SLEEPING_PARTS = ("weights", "kv_cache")
# Arguments of every `vllm.LLM`.
FIXED_ARGUMENTS = {
    "load_format": "dummy",  # the policy's weights are loaded later
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
}


def check_platform(sleeps: bool) -> None:
    """Warn about untested releases of vLLM. ValueError: `sleeps`, but the device has no sleep mode.

    Called before anything is loaded.
    """
    version = require("vllm", "use_vllm=True").__version__
    if not major_minor(OLDEST_RELEASE) <= major_minor(version) <= major_minor(NEWEST_RELEASE):
        logger.warning_once(
            f"vLLM {version} is outside the supported range {OLDEST_RELEASE} to {NEWEST_RELEASE}; "
            "generation may fail or give different results."
        )
    platform = require("vllm.platforms", "use_vllm=True").current_platform
    if sleeps and not platform.is_sleep_mode_available():
        raise ValueError(
            "vllm_enable_sleep_mode=True: vLLM has no sleep mode on this platform "
            f"({platform.device_type}); leave the option out."
        )


class VLLMEngine:
    """Wraps `vllm.LLM` for the colocated backend, and tracks which parts of it are awake."""

    def __init__(self, llm: Any, sleeps: bool = False):
        self._llm = llm
        self._sleeps = sleeps  # whether `sleep` frees memory
        self._awake = set(SLEEPING_PARTS)
        self.context_length: int = llm.model_config.max_model_len
        self.dtype: torch.dtype = llm.model_config.dtype
        self.model: nn.Module = llm.apply_model(lambda model: model)[0]
        self.on_cpu = next(self.model.parameters()).device.type == "cpu"

    def wake(self, part: str) -> None:
        """Allocate memory for the weights or the KV cache, unless they have it."""
        if part not in self._awake:
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=[part])
            self._awake.add(part)

    def sleep(self) -> bool:
        """Free weights and KV cache if the engine has sleep mode on; return whether it has."""
        if self._sleeps and self._awake:
            self._llm.sleep(level=2)
            self._awake.clear()
        return self._sleeps

    def load(self, name: str, weight: Tensor) -> None:
        """Write a weight, named as in a checkpoint, in place."""
        self.model.load_weights([(name, weight)])

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts, which were computed with earlier weights."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache: requests are still running.")

    def generate(self, requests: Sequence[CompletionRequest], sampling: Sampling) -> list[Any]:
        """Complete all requests; return vLLM's `RequestOutput`s in their order."""
        prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
        parameters = [_sampling_params(sampling, request) for request in requests]
        with unchanged_process(), _uncompiled(self.on_cpu):
            try:
                return self._llm.generate(
                    prompts, parameters, use_tqdm=False, lora_request=self._lora_request()
                )
            except torch.OutOfMemoryError as error:
                # Fewer requests would not help: the engine limits its batches itself.
                raise RuntimeError(
                    "The vLLM engine ran out of memory. Lower vllm_gpu_memory_utilization, or set "
                    "vllm_enable_sleep_mode=True."
                ) from error
            finally:
                # After an error or interrupt, requests must not run on in the next call.
                engine = self._llm.llm_engine
                if engine.has_unfinished_requests():
                    with suppress(KeyError):
                        request_ids = list(engine.output_processor.request_states)
                        engine.abort_request(request_ids, internal=True)

    def _lora_request(self) -> Any:
        """Return the `LoRARequest` of the adapter on the weights; None: no adapter."""


def _sampling_params(sampling: Sampling, request: CompletionRequest) -> Any:
    module = require("vllm.sampling_params", "use_vllm=True")
    arguments = sampling_arguments(sampling, request.num_completions, request.seed)
    structure = arguments.pop("structured_outputs", None)
    if isinstance(structure, dict):
        structure = module.StructuredOutputsParams(**structure)
    return module.SamplingParams(**arguments, structured_outputs=structure)


def sampling_fields() -> tuple[str, ...]:
    """Return the names of all options of vLLM's `SamplingParams`."""
    names = require("vllm.sampling_params", "use_vllm=True").SamplingParams.__struct_fields__
    return tuple(name for name in names if not name.startswith("_"))


def start_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    ranks: Ranks,
    engine_class: Callable[[Any, bool], VLLMEngine] = VLLMEngine,
) -> VLLMEngine:
    """Start an engine for a model, of which only the configuration is read.

    The engine's weights are random until they are loaded. `arguments` of `vllm.LLM` are added to
    `FIXED_ARGUMENTS` and those of the platform. The result is an `engine_class`.
    """
    with unchanged_process(), tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are loaded from this process
        # vLLM warns that there is no tokenizer, which is not needed.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("LOCAL_RANK", "0")
        vllm = require("vllm", "use_vllm=True")
        on_cpu = keep_weights_unpacked("use_vllm=True")
        _save_config(model, folder)
        if not arguments["skip_tokenizer_init"]:
            tokenizer.save_pretrained(folder)
        group_size = arguments.get("tensor_parallel_size", 1)
        shared_memory = _unique_shared_memory() if on_cpu and group_size > 1 else nullcontext()
        with _uncompiled(on_cpu), without_zero3_init(), shared_memory:
            llm = vllm.LLM(
                folder,
                **FIXED_ARGUMENTS,
                **_platform_arguments(on_cpu),
                distributed_executor_backend="external_launcher" if ranks.count > 1 else "uni",
                seed=ranks.rank // group_size,
                **arguments,
            )
    keep_process_groups(llm.llm_engine.engine_core, "use_vllm=True")
    return engine_class(llm, arguments.get("enable_sleep_mode", False))


def _save_config(model: PreTrainedModel, folder: str) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the engine holds unquantized weights
    config.save_pretrained(folder)


def _platform_arguments(on_cpu: bool) -> dict[str, Any]:
    return {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE} if on_cpu else {}


@contextmanager
def _unique_shared_memory() -> Iterator[None]:
    """Give the shared memory of ranks on a CPU names of this run, and unlink it at the end.

    All ranks have opened the files by then.
    """
    run_id = [uuid.uuid4().hex]
    torch.distributed.broadcast_object_list(run_id, 0)
    names = set()

    def rename(name: str) -> str:
        unique_name = f"{run_id[0]}{name.lstrip('/')}"
        names.add(unique_name)
        return unique_name

    try:
        with renamed_shared_memory(rename, "use_vllm=True"):
            yield
    finally:
        for file in Path("/dev/shm").iterdir():
            if file.name.startswith(tuple(names)):
                file.unlink(missing_ok=True)


def keep_weights_unpacked(feature: str) -> bool:
    """On a CPU, keep vLLM from repacking weights: loading would not update the repacked copies.

    Returns whether vLLM runs on a CPU.
    """
    on_cpu = bool(require("vllm.platforms", feature).current_platform.is_cpu())
    if on_cpu:
        switch_off_repacking(feature)
    return on_cpu


def _uncompiled(on_cpu: bool) -> AbstractContextManager[Any]:
    """On a CPU, do not compile: for vLLM's small functions it takes a minute and saves nothing."""
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore what vLLM changes for the whole process.

    That is the random number generators, the number of threads and `torch.set_num_threads`, the
    precision of matrix products, and environment variables.
    """
    num_threads = torch.get_num_threads()
    set_num_threads = torch.set_num_threads
    environment = dict(os.environ)
    with preserve_rng_state(), matmul_precision_kept():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            set_num_threads(num_threads)
            for name in set(os.environ) - set(environment):
                if not name.startswith("VLLM_"):  # vLLM reads its own variables again later
                    del os.environ[name]
            os.environ.update(environment)
