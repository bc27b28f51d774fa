"""`trl memory-plan`: how much memory a training command will take, before anything is loaded."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..imports import is_available
from ..memory.meter import device_bytes
from ..memory.model_size import KNOWN, load_config, model_size, quantized_bytes, shares_prompts
from ..memory.plan import Engine, Plan, render
from ..memory.settings import ASSUMED_PROMPT, RunSettings, Sharding, read_sharding
from ..number_format import format_bytes
from ..options import option
from ..trainer.base.base_config import BaseConfig
from ..trainer.kto_config import KTOConfig
from ..trainer.model_config import ModelConfig, check_adapter_options, get_peft_config
from ..trainer.offline.offline_config import OfflineConfig, PreferenceConfig
from ..trainer.reward_config import RewardConfig
from ..trainer.sft_config import SFTConfig
from .arguments import ScriptArguments
from .exit import one_line_errors
from .launch import launch_options, split
from .methods import METHODS
from .parser import TrlParser


@dataclass
class PlanArguments:
    """What is planned."""

    method: str = option("rloo", "Command whose options are given.", choices=tuple(METHODS))


def main(words: list[str] | None = None) -> None:
    """Print the plan of the training command that the options describe."""
    words = list(sys.argv[1:] if words is None else words)
    parser = parser_for(words, PlanArguments, "memory-plan")
    with one_line_errors(parser):
        script, launcher = split(parser, words)
        print(render(plan_of(parser, parser.read(script)[0], launch_options(launcher))))


def parser_for(words: list[str], own: type, command: str) -> TrlParser:
    """The options of a command, and of the training command that its `--method` names."""
    parser = TrlParser(own, prog=f"trl {command}", add_help=False)
    with one_line_errors(parser):
        method = str(parser.read(words)[0].get("method", own.method))  # type: ignore[attr-defined]
    return TrlParser((own, *METHODS[method].make_parser().dataclass_types), prog=parser.prog)


def make_parser(method: str = "rloo") -> TrlParser:
    """The options of `trl memory-plan --method METHOD`."""
    return parser_for(["--method", method], PlanArguments, "memory-plan")


def plan_of(parser: TrlParser, values: dict[str, Any], launched: Mapping[str, Any]) -> Plan:
    """Plan what options of training and `accelerate launch` describe; refuse what they refuse."""
    script, training, model_args, _ = build_options(parser, values, launched["num_processes"])[-4:]
    return make_plan(script, training, model_args, read_sharding(launched))


def build_options(parser: TrlParser, values: dict[str, Any], processes: int) -> tuple[Any, ...]:
    """Build the configurations as one of several processes on the planned device would."""
    if values.get("device_memory_gb") is not None and not torch.cuda.is_available():
        # transformers refuses what only a GPU can do, unless told that a CPU should.
        values = values | {"use_cpu": True}
    ranks = {"world_size": property(lambda self: processes)}
    parser.dataclass_types = tuple(
        type(kind.__name__, (kind,), ranks) if issubclass(kind, BaseConfig) else kind
        for kind in parser.dataclass_types
    )
    built = parser.build(values)
    check_adapter_options(built[-2], values)
    if built[-2].model_name_or_path is None:
        raise ValueError("--model_name_or_path is required.")
    return built


def make_plan(
    script: ScriptArguments,
    training: Any,
    model_args: ModelConfig,
    sharding: Sharding | None = None,
) -> Plan:
    """Plan a run from its three configurations, and from what its ranks divide."""
    trusted = training.trust_remote_code
    revision = (training.model_init_kwargs or {}).get("revision", model_args.model_revision)
    config = load_config(model_args.model_name_or_path or "", revision, trusted)
    run = settings(script, training, model_args, config)
    values = getattr(script, "value_model_name_or_path", None)
    if values is not None:
        run = run.replace(value_model=model_size(load_config(values), classifies=True))
    if sharding is not None:
        run = run.replace(**_division(training, model_args, run, sharding))

    def sized(chosen: ModelConfig) -> Any:
        adapter = get_peft_config(chosen)
        return model_size(config, adapter, trusted, isinstance(training, RewardConfig))

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    given = script.device_memory_gb
    planned = device_bytes(device) if given is None else given * 1e9
    plan = Plan(sized(model_args), run, planned)
    if not model_args.use_peft and is_available("peft"):
        with suppress(ValueError):  # there is no adapter for this model
            plan = replace(plan, adapter=sized(replace(model_args, use_peft=True)))
    plan = _with_engine(plan, training)
    return replace(plan, notes=(*_notes(plan, script, training), *plan.notes))


def settings(
    script: ScriptArguments, training: Any, model_args: ModelConfig, config: Any
) -> RunSettings:
    """Turn options into the numbers of the estimate."""
    has_gpu = torch.cuda.is_available() and not training.use_cpu
    facts = _precision(training, model_args, config)
    facts["on_cpu"] = script.device_memory_gb is None and not has_gpu
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(training, OfflineConfig):
        length = training.max_length or context or ASSUMED_PROMPT
        run = _of_examples(script, training, length, facts)
    else:
        assumed = min(ASSUMED_PROMPT, (context or 2**20) - training.max_completion_length)
        prompt = script.longest_prompt or training.max_prompt_length or max(1, assumed)
        run = RunSettings.of(training, prompt=prompt, **facts)
    kind = isinstance(training, RewardConfig)
    longest = run.prompt + run.completion
    shares = shares_prompts(config, model_args.attn_implementation, longest, kind)
    return run.replace(shared_prefix=run.shared_prefix and shares)


def _of_examples(
    script: ScriptArguments, training: OfflineConfig, length: int, facts: dict[str, Any]
) -> RunSettings:
    """What the options of a run on a dataset say; prompts are there where answers share them."""
    if isinstance(training, SFTConfig):
        return RunSettings.of_examples(training, 1, 0, length, **facts)
    assumed, answers, longest = min(ASSUMED_PROMPT, length // 2), 2, None
    if isinstance(training, PreferenceConfig):
        assumed, longest = training.max_prompt_length or assumed, training.max_completion_length
        facts["reference"] = training.needs_reference and not training.precompute_ref_log_probs
    if isinstance(training, KTOConfig):
        # Answers of the KL estimate have no gradient. Those of several micro-batches come before.
        answers, several = 1, training.gradient_accumulation_steps > 1
        facts["scores_policy"] = several and training.estimates_kl
    prompt = min(script.longest_prompt or assumed, length - 1)
    answer = min(length - prompt, longest or length)
    return RunSettings.of_examples(training, answers, prompt, answer, **facts)


def _with_engine(plan: Plan, training: Any) -> Plan:
    """The plan with the memory of the engine that generates, if it is not the policy itself."""
    run = plan.run
    if not run.generates or not training.use_vllm:
        return plan
    sleeps, share = training.vllm_enable_sleep_mode, training.vllm_gpu_memory_utilization
    found, words = 0.0, "its server has GPUs of its own"
    if training.vllm_mode == "colocate":
        ranks, longest = training.vllm_tensor_parallel_size, run.prompt + run.completion
        context = training.vllm_max_model_length or plan.model.context or longest
        engine = Engine(plan, ranks, context, run.rows * ranks, sleeps)
        if share is None:
            found = engine.memory(min(longest, context)).total
        else:
            found = share * plan.device_bytes
        tokens = (found - engine.weights) / engine.token
        if tokens <= 0:
            raise ValueError(
                f"vllm_gpu_memory_utilization={share} leaves no room for "
                f"{format_bytes(engine.weights)} of weights on each GPU: raise "
                "it, or vllm_tensor_parallel_size."
            )
        words = f"{format_bytes(engine.weights)} of weights, and room for a cache of "
        words += f"{tokens:,.0f} tokens"
    run = run.replace(engine_bytes=found, engine_sleeps=sleeps)
    return replace(plan, run=run, notes=(f"vLLM generates: {words}.",))


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


def _precision(training: Any, model_args: ModelConfig, config: Any) -> dict[str, Any]:
    """Settings about bytes of weights, of operands of products, and of quantized weights."""
    dtype = (training.model_init_kwargs or {}).get("dtype", model_args.dtype)
    if dtype in (None, "auto"):
        dtype = getattr(config.get_text_config(), "dtype", None) or "float32"
    weight = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    product, matrix = 2 if training.bf16 or training.fp16 else weight, quantized_bytes(model_args)
    weight = weight if matrix is None else 4
    return {"weight_bytes": weight, "product_bytes": product, "matrix_bytes": matrix}


def _notes(plan: Plan, script: Any, training: Any) -> list[str]:
    """What the plan takes for granted or leaves out."""
    run, context, shares = plan.run, plan.model.context, plan.estimate.shares
    length, sharding = run.prompt + run.completion, run.sharding
    is_known = script.longest_prompt or getattr(training, "max_prompt_length", None)
    is_cut = run.generates and run.prompt < ASSUMED_PROMPT
    rest = f", what max_completion_length leaves of the model's context of {context}"
    notes = {
        f"Prompts are assumed to have up to {run.prompt} tokens{rest * is_cut}; give "
        "--longest_prompt.": bool(run.prompt and not is_known),
        "The reward model is not counted.": (
            getattr(script, "reward_model_name_or_path", None) is not None
        ),
        f"The longest {'prompt and completion' if run.prompt else 'rows'} have {length} tokens, "
        f"more than the model's context of {context}.": length > (context or length),
        f"What {run.optimizer} keeps is unknown; two float32 states are assumed.": (
            run.optimizer not in KNOWN
        ),
        "Layers are assumed to be like Llama's, with a gated MLP.": not plan.model.gated,
        "Every rank holds the whole model; --accelerate_config zero2, zero3 or fsdp2 divides it.": (
            run.processes > 1 and not sharding.stage
        ),
        "FSDP sums whole gradients until the last micro-batch; the accelerator_config option "
        "gradient_accumulation_kwargs={'sync_each_batch': true} divides them each time.": (
            sharding.is_fsdp and run.accumulation > 1 and shares.waiting > shares.gradients
        ),
        "Quantized weights stay whole on every rank; "
        "bnb_4bit_quant_storage=bfloat16 lets them be divided.": (
            all((sharding.divides_weights, run.matrix_bytes, not run.divides_quantized))
        ),
    }
    return [text for text, holds in notes.items() if holds]
