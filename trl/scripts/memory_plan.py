"""`trl memory-plan`: how much memory a training command will take, before anything is loaded."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from ..cli.launch import num_processes, split
from ..cli.parser import TrlParser
from ..data.mixture import DatasetMixtureConfig
from ..imports import is_available
from ..memory.model_size import ModelSize, load_config, model_size, shares_prompts
from ..memory.optimizers import states_of
from ..memory.plan import Plan
from ..memory.plan_table import render
from ..memory.settings import RunSettings
from ..trainer.model_config import ModelConfig, get_peft_config
from ..trainer.options import option
from .arguments import OnlineScriptArguments
from .run import USER_ERRORS

METHODS = ("rloo", "grpo")
ASSUMED_PROMPT = 512
# Bytes of a quantized weight: its bits, and the float32 or nested scale of each block of 64.
QUANTIZED = {8: 1.0, 4: 0.5 + 4 / 64}
NESTED = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass
class PlanArguments:
    """What is planned."""

    method: str = option("rloo", "Command whose options are given.", choices=METHODS)


def main(words: list[str] | None = None) -> None:
    """Print the plan of the training command that the options describe."""
    words = list(sys.argv[1:] if words is None else words)
    parser = TrlParser(PlanArguments, prog="trl memory-plan", add_help=False)
    try:
        parser = make_parser(parser.read(words)[0].get("method", "rloo"))
        if {"-h", "--help"} & set(words):
            parser.print_help()
            return
        script, launcher = split(parser, words)
        print(describe(parser, parser.read(script)[0], num_processes(launcher)))
    except USER_ERRORS as error:
        if os.environ.get("TRL_DEBUG") == "1":
            raise
        parser.error(" ".join(str(error).split()))


def make_parser(method: str) -> TrlParser:
    """The options of `trl memory-plan --method METHOD`."""
    types = (PlanArguments, OnlineScriptArguments, _config_class(method), ModelConfig)
    return TrlParser((*types, DatasetMixtureConfig), prog="trl memory-plan")


def _config_class(method: str) -> type:
    module = import_module(f"trl.trainer.{method}_config")
    return getattr(module, f"{method.upper()}Config")


def describe(parser: TrlParser, values: dict[str, Any], processes: int) -> str:
    """Return the plan as text.

    Args:
        parser: knows the options, those of a training command among them.
        values: the options given.
        processes (`int`): ranks that will train.

    Raises:
        ValueError: for options that training would refuse, too.
    """
    built = {type(x).__name__: x for x in _build(parser, values, processes)}
    script, model_args = built["OnlineScriptArguments"], built["ModelConfig"]
    training = next(x for x in built.values() if hasattr(x, "batch_plan"))
    if model_args.model_name_or_path is None:
        raise ValueError("--model_name_or_path is required.")
    plan = make_plan(script, training, model_args)
    return "\n".join([render(plan), "", *_notes(plan, script, training)])


def _build(parser: TrlParser, values: dict[str, Any], processes: int) -> tuple[Any, ...]:
    """Build the configurations as one of several processes on the planned device would."""
    if values.get("device_memory_gb") is not None and not torch.cuda.is_available():
        # transformers refuses what only a GPU can do, unless told that a CPU should.
        values = values | {"use_cpu": True}
    ranks = {"world_size": property(lambda self: processes)}
    kinds = parser.dataclass_types
    parser.dataclass_types = tuple(
        type(kind.__name__, (kind,), ranks) if hasattr(kind, "batch_plan") else kind
        for kind in kinds
    )
    return parser.build(values)


def make_plan(script: OnlineScriptArguments, training: Any, model_args: ModelConfig) -> Plan:
    """Plan a run from its three configurations.

    Raises:
        OSError: if the model has no configuration.
    """
    init_kwargs = {"revision": model_args.model_revision} | (training.model_init_kwargs or {})
    config = load_config(
        model_args.model_name_or_path or "", init_kwargs["revision"], training.trust_remote_code
    )
    trusted = training.trust_remote_code
    device = script.device_memory_gb
    return Plan(
        model=model_size(config, get_peft_config(model_args), trusted),
        run=settings(script, training, model_args, config),
        device_bytes=device_bytes() if device is None else device * 1e9,
        adapter=None if model_args.use_peft else _with_adapter(config, model_args, trusted),
    )


def _with_adapter(config: Any, model_args: ModelConfig, trusted: bool) -> ModelSize | None:
    """The model with the adapter that `use_peft` would train, if there is one for it."""
    if not is_available("peft"):
        return None
    try:
        return model_size(config, get_peft_config(replace(model_args, use_peft=True)), trusted)
    except ValueError:
        return None


def settings(
    script: OnlineScriptArguments, training: Any, model_args: ModelConfig, config: Any
) -> RunSettings:
    """Turn options into the numbers of the estimate."""
    batches = training.batch_plan
    prompt = script.longest_prompt or ASSUMED_PROMPT
    completion = training.max_completion_length
    weight_bytes, product_bytes, matrix_bytes = _precision(training, model_args, config)
    shares = shares_prompts(config, model_args.attn_implementation, prompt + completion)
    return RunSettings(
        group_size=batches.group_size,
        prompt=prompt,
        completion=completion,
        micro_batch=batches.micro_batch,
        slices=batches.slices,
        accumulation=batches.accumulation,
        passes=batches.iterations,
        processes=batches.num_processes,
        weight_bytes=weight_bytes,
        product_bytes=product_bytes,
        matrix_bytes=matrix_bytes,
        optimizer=str(getattr(training.optim, "value", training.optim)),
        optimizer_args=training.optim_args,
        gradient_checkpointing=bool(training.gradient_checkpointing),
        reference=training.beta != 0.0,
        scores_policy=_scores_policy(training),
        shared_prefix=getattr(training, "shared_prefix", False) and shares,
        logits_chunk=getattr(training, "logits_chunk_size", 0),
        generation_rows=getattr(training, "generation_max_rows", None),
        generation_kv_gb=getattr(training, "generation_max_kv_gb", None),
        on_cpu=script.device_memory_gb is None and _trains_on_cpu(training),
    )


def _scores_policy(training: Any) -> bool:
    """Whether the policy is scored without gradient: off-policy, or for a penalty in the reward."""
    penalized = training.beta != 0.0 and hasattr(training, "reward_clip_range")
    reused = getattr(training, "reuse_sampling_logps", False)
    return not training.batch_plan.is_on_policy or (penalized and not reused)


def _trains_on_cpu(training: Any) -> bool:
    return bool(training.use_cpu) or not torch.cuda.is_available()


def _precision(
    training: Any, model_args: ModelConfig, config: Any
) -> tuple[int, int, float | None]:
    """Bytes of a weight, of an operand of a product, and of a quantized weight."""
    dtype = (training.model_init_kwargs or {}).get("dtype", model_args.dtype)
    if dtype in (None, "auto"):
        dtype = getattr(config.get_text_config(), "dtype", None) or "float32"
    weight = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    product = 2 if training.bf16 or training.fp16 else weight
    if model_args.load_in_8bit:
        return 4, product, QUANTIZED[8]
    if model_args.load_in_4bit:
        return 4, product, NESTED if model_args.use_bnb_nested_quant else QUANTIZED[4]
    return weight, product, None


def device_bytes() -> float:
    """Memory of the first GPU, or of the machine if it has none."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _notes(plan: Plan, script: OnlineScriptArguments, training: Any) -> list[str]:
    """What the plan takes for granted or leaves out."""
    model: ModelSize = plan.model
    name = plan.run.optimizer
    notes = {
        f"Prompts are assumed to have up to {ASSUMED_PROMPT} tokens; say --longest_prompt.": (
            script.longest_prompt is None
        ),
        "The reward model is not counted.": script.reward_model_name_or_path is not None,
        f"What {name} keeps is not known; two float32 states are assumed.": (
            states_of(name, plan.run.optimizer_args) is None
        ),
        "Layers are taken to be like Llama's, with a gated MLP.": not model.gated,
        "Every rank holds the whole model: sharding by FSDP or ZeRO is not counted.": (
            plan.run.processes > 1
        ),
    }
    return [f"Note: {text}" for text, holds in notes.items() if holds]
