"""`trl memory-plan`: how much memory a training command will take, before anything is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..imports import is_available
from ..memory.engine import Engine
from ..memory.model_size import KNOWN, ModelSize, load_config, model_size, shares_prompts
from ..memory.plan import Plan, render, size
from ..memory.probes import device_bytes
from ..memory.settings import (
    ASSUMED_PROMPT,
    RunSettings,
    Sharding,
    read_sharding,
)
from ..trainer.base.base_config import BaseConfig
from ..trainer.base.options import option
from ..trainer.model_config import ModelConfig, get_peft_config
from ..trainer.sft_config import SFTConfig
from .arguments import OnlineScriptArguments, ScriptArguments
from .commands import TRAINING
from .exit import USER_ERRORS
from .launch import launch_options, split
from .parser import TrlParser

# Those of whose rows the plan knows the shape.
ONLINE = "trl.cli.arguments.OnlineScriptArguments"
PLANNED = ("sft", *(name for name, command in TRAINING.items() if command.arguments == ONLINE))
# Bytes of a quantized weight: its bits, and the float32 or nested scale of each block of 64.
QUANTIZED = {8: 1.0, 4: 0.5 + 4 / 64}
NESTED = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass
class PlanArguments:
    """What is planned."""

    method: str = option("rloo", "Command whose options are given.", choices=PLANNED)


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
        print(plan_of(parser, parser.read(script)[0], launch_options(launcher)).text)
    except USER_ERRORS as error:
        if os.environ.get("TRL_DEBUG") == "1":
            raise
        parser.error(" ".join(str(error).split()))


def make_parser(method: str = "rloo") -> TrlParser:
    """The options of `trl memory-plan --method METHOD`."""
    types = TRAINING[method].make_parser().dataclass_types
    return TrlParser((PlanArguments, *types), prog="trl memory-plan")


@dataclass(frozen=True)
class Planned:
    """What the options of a run come to.

    Args:
        plan (`Plan`): its memory.
        notes (`list[str]`): what it takes for granted or leaves out.
    """

    plan: Plan
    notes: list[str]

    @property
    def text(self) -> str:
        """For a terminal."""
        return "\n\n".join([render(self.plan), "\n".join(self.notes)]).rstrip("\n")


def plan_of(parser: TrlParser, values: dict[str, Any], launched: Mapping[str, Any]) -> Planned:
    """Plan what the options describe.

    Args:
        parser: knows the options, those of a training command among them.
        values: the options given.
        launched: options of `accelerate launch`; see `read_sharding`.

    Raises:
        ValueError: for options that training would refuse, too.
    """
    script, training, model_args, _ = build_options(parser, values, launched["num_processes"])[-4:]
    if model_args.model_name_or_path is None:
        raise ValueError("--model_name_or_path is required.")
    plan = make_plan(script, training, model_args, read_sharding(launched))
    return Planned(plan, _notes(plan, script, training))


def build_options(parser: TrlParser, values: dict[str, Any], processes: int) -> tuple[Any, ...]:
    """Build the configurations as one of several processes on the planned device would.

    Args:
        parser, values: as for `plan_of`.
        processes (`int`): of the run.
    """
    if values.get("device_memory_gb") is not None and not torch.cuda.is_available():
        # transformers refuses what only a GPU can do, unless told that a CPU should.
        values = values | {"use_cpu": True}
    ranks = {"world_size": property(lambda self: processes)}
    parser.dataclass_types = tuple(
        type(kind.__name__, (kind,), ranks) if issubclass(kind, BaseConfig) else kind
        for kind in parser.dataclass_types
    )
    return parser.build(values)


def make_plan(
    script: ScriptArguments,
    training: Any,
    model_args: ModelConfig,
    sharding: Sharding | None = None,
) -> Plan:
    """Plan a run from its three configurations, and from what its ranks divide.

    Raises:
        OSError: if the model has no configuration.
    """
    trusted = training.trust_remote_code
    revision = (training.model_init_kwargs or {}).get("revision", model_args.model_revision)
    config = load_config(model_args.model_name_or_path or "", revision, trusted)
    run = settings(script, training, model_args, config)
    if sharding is not None:
        run = run.replace(**_division(training, model_args, run, sharding))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    given = script.device_memory_gb
    plan = Plan(
        model=model_size(config, get_peft_config(model_args), trusted),
        run=run,
        device_bytes=device_bytes(device) if given is None else given * 1e9,
        adapter=None if model_args.use_peft else _with_adapter(config, model_args, trusted),
    )
    return _with_engine(plan, training)


def _with_adapter(config: Any, model_args: ModelConfig, trusted: bool) -> ModelSize | None:
    """The model with the adapter that `use_peft` would train, if there is one for it."""
    if not is_available("peft"):
        return None
    try:
        return model_size(config, get_peft_config(replace(model_args, use_peft=True)), trusted)
    except ValueError:
        return None


def settings(
    script: ScriptArguments, training: Any, model_args: ModelConfig, config: Any
) -> RunSettings:
    """Turn options into the numbers of the estimate."""
    weight_bytes, product_bytes, matrix_bytes = _precision(training, model_args, config)
    has_gpu = torch.cuda.is_available() and not training.use_cpu
    facts = {
        "weight_bytes": weight_bytes,
        "product_bytes": product_bytes,
        "matrix_bytes": matrix_bytes,
        "on_cpu": script.device_memory_gb is None and not has_gpu,
    }
    if not isinstance(script, OnlineScriptArguments):
        if not isinstance(training, SFTConfig):
            raise ValueError("There is no memory plan of this command: leave out --plan.")
        context = getattr(config.get_text_config(), "max_position_embeddings", ASSUMED_PROMPT)
        return RunSettings.of_documents(training, context, **facts)
    prompt = script.longest_prompt or _assumed_prompt(training, config)
    longest = prompt + training.max_completion_length
    shares = shares_prompts(config, model_args.attn_implementation, longest)
    shared = training.shared_prefix and shares
    return RunSettings.of(training, prompt=prompt, shared_prefix=shared, **facts)


def _assumed_prompt(training: Any, config: Any) -> int:
    """Tokens of the longest prompt where nothing is said of it: what the context has room for."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return ASSUMED_PROMPT
    return max(1, min(ASSUMED_PROMPT, context - training.max_completion_length))


def _with_engine(plan: Plan, training: Any) -> Plan:
    """The plan with the memory of the engine that generates, if it is not the policy itself.

    Raises:
        ValueError: if the engine does not fit beside training.
    """
    if not plan.run.generates or not training.use_vllm:
        return plan
    sleeps, share = training.vllm_enable_sleep_mode, training.vllm_gpu_memory_utilization
    if training.vllm_mode != "colocate":
        found = 0.0
    elif share is not None:
        found = share * plan.device_bytes
    else:
        engine = _engine(plan, training)
        shortest = min(plan.run.prompt + plan.run.completion, engine.context)
        found = engine.memory(shortest).total
    return replace(plan, run=plan.run.replace(engine_bytes=found, engine_sleeps=sleeps))


def _engine(plan: Plan, training: Any) -> Engine:
    run, ranks = plan.run, training.vllm_tensor_parallel_size
    context = training.vllm_max_model_length or plan.model.context or run.prompt + run.completion
    return Engine(plan, ranks, context, run.rows * ranks, training.vllm_enable_sleep_mode)


def _division(
    training: Any, model_args: ModelConfig, run: RunSettings, sharding: Sharding
) -> dict[str, Any]:
    """Settings about what the ranks divide."""
    accumulation = getattr(training.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    syncs = sharding.is_zero or bool(accumulation.get("sync_each_batch"))
    storage = model_args.bnb_4bit_quant_storage or "uint8"
    found: dict[str, Any] = {"sharding": replace(sharding, syncs=syncs)}
    found["divides_quantized"] = "float" in storage and not model_args.load_in_8bit
    if (training.bf16 or training.fp16) and (sharding.is_zero or sharding.is_fsdp):
        # The engine casts the weights themselves, so that no operator has to.
        found |= {"loaded_bytes": run.weight_bytes, "weight_bytes": 2}
    return found


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


def _notes(plan: Plan, script: ScriptArguments, training: Any) -> list[str]:
    """What the plan takes for granted or leaves out."""
    model: ModelSize = plan.model
    name = plan.run.optimizer
    row, context = plan.run.prompt + plan.run.completion, model.context
    online = _online_notes(plan, script, training) if plan.run.generates else {}
    longest = "prompt and completion have" if plan.run.generates else "rows have"
    notes = online | {
        f"The longest {longest} {row} tokens, more than the model's context of {context}.": (
            context is not None and row > context
        ),
        f"What {name} keeps is not known; two float32 states are assumed.": (name not in KNOWN),
        "Layers are taken to be like Llama's, with a gated MLP.": not model.gated,
        "Every rank holds the whole model; --accelerate_config zero2, zero3 or fsdp2 divides it.": (
            plan.run.processes > 1 and not plan.run.sharding.stage
        ),
        "FSDP sums whole gradients until the last micro-batch; the accelerator_config option "
        "gradient_accumulation_kwargs={'sync_each_batch': true} divides them each time.": (
            plan.estimate.shares.waiting > plan.estimate.shares.gradients
            and plan.run.sharding.is_fsdp
            and plan.run.accumulation > 1
        ),
        "Quantized weights stay whole on every rank; "
        "bnb_4bit_quant_storage=bfloat16 lets them be divided.": (
            plan.run.sharding.divides_weights
            and plan.run.matrix_bytes is not None
            and not plan.run.divides_quantized
        ),
    }
    return [f"Note: {text}" for text, holds in notes.items() if holds]


def _online_notes(plan: Plan, script: Any, training: Any) -> dict[str, bool]:
    prompt, context = plan.run.prompt, plan.model.context
    engine = f": {_engine_words(plan, training)}" if training.use_vllm else ""
    rest = f", what max_completion_length leaves of the model's context of {context}"
    rest = "" if prompt == ASSUMED_PROMPT else rest
    return {
        f"Prompts are assumed to have up to {prompt} tokens{rest}; say --longest_prompt.": (
            script.longest_prompt is None
        ),
        "The reward model is not counted.": script.reward_model_name_or_path is not None,
        f"vLLM generates{engine}.": bool(training.use_vllm),
    }


def _engine_words(plan: Plan, training: Any) -> str:
    """What a generation engine makes of its memory."""
    if training.vllm_mode != "colocate":
        return "its server has GPUs of its own"
    engine = _engine(plan, training)
    room = (plan.run.engine_bytes or 0.0) - engine.weights
    if room <= 0:
        raise ValueError(
            f"vllm_gpu_memory_utilization={training.vllm_gpu_memory_utilization} leaves no room "
            f"for {size(engine.weights)} of weights on each GPU: raise it, or "
            "vllm_tensor_parallel_size."
        )
    tokens = room / engine.token
    return f"{size(engine.weights)} of weights, and room for a cache of {tokens:,.0f} tokens"
