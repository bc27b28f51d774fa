"""Options of generation: engine, sampling and tools."""

from dataclasses import dataclass

from ..options import option


@dataclass
class GenerationOptions:
    """The engine that completes prompts, how it samples tokens, and limits of tool calls."""

    max_completion_length: int = option(512, "Maximum length of a completion in tokens.", ge=1)
    temperature: float = option(
        1.0,
        "Sampling temperature; also divides the logits in training.",
        gt=0,
        hint="for greedy decoding: generation_kwargs={'do_sample': False}",
    )
    top_p: float = option(
        1.0, "Sample from the most likely tokens with this total probability.", gt=0, le=1
    )
    top_k: int | None = option(
        0, "Sample from this many most likely tokens; 0, None: all.", ge=0, hint="0: off"
    )
    min_p: float | None = option(
        None, "Drop tokens less likely than this fraction of the most likely one.", ge=0, le=1
    )
    repetition_penalty: float = option(1.0, "Above 1, repeated tokens become less likely.", gt=0)
    generation_kwargs: dict | str | None = option(
        None, "More options of the generation engine (JSON); they override the named ones."
    )
    # --- Generation by transformers ---
    generation_max_rows: int | None = option(
        None, "Maximum number of completions generated at once on a rank. None: all.", ge=1
    )
    generation_max_kv_gb: float | None = option(
        None, "Limit, in GB, of the key-value cache held while generating. None: no limit.", gt=0
    )
    cache_implementation: str | None = option(None, "Type of key-value cache for generation.")
    ds3_gather_for_generation: bool = option(
        True, "ZeRO-3, FSDP: gather all weights once for generation; False: one layer at a time."
    )
    use_transformers_continuous_batching: bool = option(
        False, "Generate with the continuous batching of transformers."
    )
    transformers_continuous_batching_config: dict | str | None = option(
        None, "Options of continuous batching (JSON)."
    )
    # --- Generation by vLLM, in this process or on a server ---
    use_vllm: bool = option(False, "Generate with vLLM.")
    vllm_mode: str = option(
        "colocate", "Run vLLM in this process or on a server.", choices=("colocate", "server")
    )
    vllm_model_impl: str = option("vllm", "Model implementation.", choices=("vllm", "transformers"))
    vllm_enable_sleep_mode: bool = option(False, "Free the memory of vLLM outside generation.")
    vllm_structured_outputs_regex: str | None = option(None, "Regular expression for completions.")
    vllm_server_base_url: str | None = option(None, "Address of the vLLM server.")
    vllm_server_host: str = option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = option(8000, "Port of the vLLM server.", ge=1, le=65535)
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the vLLM server.", gt=0)
    vllm_group_port: int = option(51216, "No effect: weights need no port.")
    vllm_gpu_memory_utilization: float | None = option(
        None,
        "Fraction of GPU memory for a colocated engine. None: what training leaves.",
        gt=0,
        le=1,
    )
    vllm_max_model_length: int | None = option(
        None, "Context length of a colocated engine. None: from the model.", ge=1
    )
    vllm_tensor_parallel_size: int = option(1, "Ranks that share a colocated engine.", ge=1)
    vllm_probe_syncs: int = option(
        50,
        "Compare log-probabilities with vLLM once in this many weight syncs; 0: never.",
        ge=0,
        hint="0: never",
    )
    vllm_sync_adapter_only: bool = option(
        False, "Send base weights to a colocated engine once, and then only the LoRA adapter."
    )
    # --- Tools ---
    max_tool_calling_iterations: int | None = option(
        None, "Maximum number of turns whose tool calls are answered. None: no limit.", ge=0
    )
    tool_timeout: float | None = option(
        60.0,
        "Seconds a tool call may take. None: no limit, and tools run in the main thread.",
        gt=0,
        hint="None: no limit",
    )

    def engine_problems(self) -> dict[str, bool]:
        """Map an error message for each forbidden combination of options to whether it is set."""
        vllm_conflict = (
            "cannot be used with use_vllm=True: it is an option of generation by transformers. "
            "Leave one of them out"
        )
        adapter_only = self.use_vllm and self.vllm_sync_adapter_only
        return {
            f"ds3_gather_for_generation=False {vllm_conflict}": (
                self.use_vllm and not self.ds3_gather_for_generation
            ),
            f"use_transformers_continuous_batching=True {vllm_conflict}": (
                self.use_vllm and self.use_transformers_continuous_batching
            ),
            "vllm_sync_adapter_only=True cannot be used with vllm_enable_sleep_mode=True: base "
            "weights would have to be sent after each sleep": (
                adapter_only and self.vllm_enable_sleep_mode
            ),
            "vllm_sync_adapter_only=True cannot be used with vllm_tensor_parallel_size above 1": (
                adapter_only and self.vllm_tensor_parallel_size > 1
            ),
        }
