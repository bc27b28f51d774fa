"""`trl memory-plan`: print how much memory a training command will take, before it runs."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from ..imports import is_available
from ..memory.engine_memory import Engine
from ..memory.meter import device_bytes
from ..memory.model_size import (
    KNOWN_OPTIMIZERS,
    ModelSize,
    load_config,
    model_size,
    quantized_bytes,
    shares_prompts,
)
from ..memory.plan import Plan, render
from ..memory.settings import ASSUMED_PROMPT, RunSettings, Sharding, read_sharding
from ..models.loading import dtype_of_name
from ..number_format import format_bytes
from ..options import option
from ..trainer.base.base_config import BaseConfig
from ..trainer.kto_config import KTOConfig
from ..trainer.model_config import ModelConfig, check_adapter_options, get_peft_config
from ..trainer.offline.offline_config import OfflineConfig, PreferenceConfig
from ..trainer.online.online_config import OnlineConfig
from ..trainer.reward_config import RewardConfig
from ..trainer.sft_config import SFTConfig
from .arguments import ScriptArguments
from .exit import one_line_errors
from .launch import launch_options, split_arguments
from .methods import METHODS
from .mixture import DatasetMixtureConfig
from .parser import TrlParser


@dataclass
class PlanArguments:
    """What is planned."""

    method: str = option("rloo", "Command whose options are given.", choices=tuple(METHODS))


@dataclass
class RunOptions:
    """The options of a training command, as configurations."""

    script: ScriptArguments
    training: BaseConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig
    own: Any = None  # the options of `trl memory-plan` or `trl lengths` themselves


def main(argv: list[str] | None = None) -> None:
    """Print the plan of the training command that the options describe."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = parser_for(argv, PlanArguments, "memory-plan")
    with one_line_errors(parser):
        arguments = split_arguments(parser, argv)
        values = parser.read(arguments.script_argv).values
        plan = plan_of(parser, values, launch_options(arguments.launcher_argv))
        print(render(plan))


def parser_for(argv: list[str], own_options: type, command: str) -> TrlParser:
    """Return a parser of a command's own options and those of the training command in `--method`.

    Args:
        own_options: a dataclass with the field `method`.
    """
    parser = TrlParser(own_options, prog=f"trl {command}", add_help=False)
    with one_line_errors(parser):
        method = str(parser.read(argv).values.get("method", parser.default("method")))
    training_types = METHODS[method].make_parser().dataclass_types
    return TrlParser((own_options, *training_types), prog=parser.prog)


def make_parser(method: str = "rloo") -> TrlParser:
    """Return the parser of `trl memory-plan --method METHOD`."""
    return parser_for(["--method", method], PlanArguments, "memory-plan")


def plan_of(parser: TrlParser, values: dict[str, Any], launcher_options: Mapping[str, Any]) -> Plan:
    """Plan a run from the options of a training command and of `accelerate launch`.

    Raises:
        ValueError: the training command would refuse the options.
    """
    options = build_options(parser, values, launcher_options["num_processes"])
    return make_plan(
        options.script, options.training, options.model, read_sharding(launcher_options)
    )


def build_options(parser: TrlParser, values: dict[str, Any], processes: int) -> RunOptions:
    """Build the configurations as they would be in one of several processes on the planned device.

    Args:
        processes: number of processes of the run.
    """
    if values.get("device_memory_gb") is not None and not torch.cuda.is_available():
        # Without this, transformers refuses options that need a GPU, such as bf16.
        values = values | {"use_cpu": True}
    parser.dataclass_types = tuple(
        _with_world_size(dataclass_type, processes)
        if issubclass(dataclass_type, BaseConfig)
        else dataclass_type
        for dataclass_type in parser.dataclass_types
    )
    *own, script, training, model, mixture = parser.build(values)
    check_adapter_options(model, values)
    if model.model_name_or_path is None:
        raise ValueError("--model_name_or_path is required.")
    return RunOptions(script, training, model, mixture, own=own[0] if own else None)


def _with_world_size(config_type: type, processes: int) -> type:
    """Return a subclass of a training configuration with a fixed number of processes."""
    overrides = {"world_size": property(lambda self: processes)}
    return type(config_type.__name__, (config_type,), overrides)


def make_plan(
    script: ScriptArguments,
    training: BaseConfig,
    model_args: ModelConfig,
    sharding: Sharding | None = None,
) -> Plan:
    """Plan a run from its three configurations, and from how its ranks shard the model."""
    trust_remote_code = training.trust_remote_code
    revision = _model_init_kwargs(training).get("revision", model_args.model_revision)
    config = load_config(model_args.model_name_or_path or "", revision, trust_remote_code)
    run = settings(script, training, model_args, config)
    value_model = getattr(script, "value_model_name_or_path", None)
    if value_model is not None:
        run = run.replace(value_model=model_size(load_config(value_model), classifies=True))
    if sharding is not None:
        run = run.replace(**_sharding_settings(training, model_args, run, sharding))

    def size_of(options: ModelConfig) -> ModelSize:
        classifies = isinstance(training, RewardConfig)
        return model_size(config, get_peft_config(options), trust_remote_code, classifies)

    if script.device_memory_gb is None:
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        planned_bytes = device_bytes(device)
    else:
        planned_bytes = script.device_memory_gb * 1e9
    plan = Plan(size_of(model_args), run, planned_bytes)
    if not model_args.use_peft and is_available("peft"):
        with suppress(ValueError):  # peft has no default adapter for this model
            plan = replace(plan, adapter=size_of(replace(model_args, use_peft=True)))
    if isinstance(training, OnlineConfig):
        plan = _add_vllm_engine(plan, training)
    notes = [*_assumption_notes(plan, script, training), *_sharding_notes(plan)]
    return replace(plan, notes=(*notes, *plan.notes))


def settings(
    script: ScriptArguments,
    training: BaseConfig,
    model_args: ModelConfig,
    config: PretrainedConfig,
) -> RunSettings:
    """Turn the options of a run into the numbers that the estimate needs."""
    has_gpu = torch.cuda.is_available() and not training.use_cpu
    facts = _precision_settings(training, model_args, config)
    facts["on_cpu"] = script.device_memory_gb is None and not has_gpu
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(training, OfflineConfig):
        length = training.max_length or context or ASSUMED_PROMPT
        run = _offline_settings(script, training, length, facts)
    else:
        # Without a context in the configuration, only the assumed prompt limits the length.
        room = (context or 2**20) - training.max_completion_length
        assumed_prompt = max(1, min(ASSUMED_PROMPT, room))
        prompt = script.longest_prompt or training.max_prompt_length or assumed_prompt
        run = RunSettings.of(training, prompt=prompt, **facts)
    can_share_prompts = shares_prompts(
        config,
        model_args.attn_implementation,
        run.prompt + run.completion,
        isinstance(training, RewardConfig),
    )
    return run.replace(shared_prefix=run.shared_prefix and can_share_prompts)


def _offline_settings(
    script: ScriptArguments, training: OfflineConfig, length: int, facts: dict[str, Any]
) -> RunSettings:
    """Return the settings of a run on a dataset with rows of `length` tokens.

    Only rows with answers have prompts; documents have none.
    """
    if isinstance(training, SFTConfig):
        return RunSettings.of_examples(training, 1, 0, length, **facts)
    assumed_prompt = min(ASSUMED_PROMPT, length // 2)
    answers = 2
    longest_answer = None
    if isinstance(training, PreferenceConfig):
        assumed_prompt = training.max_prompt_length or assumed_prompt
        longest_answer = training.max_completion_length
        facts["reference"] = training.needs_reference and not training.precompute_ref_log_probs
    if isinstance(training, KTOConfig):
        answers = 1
        # The answers of the KL estimate are scored without a gradient. With several micro-batches,
        # they are scored before all of them.
        accumulates = training.gradient_accumulation_steps > 1
        facts["scores_policy"] = accumulates and training.estimates_kl
    prompt = min(script.longest_prompt or assumed_prompt, length - 1)
    answer = min(length - prompt, longest_answer or length)
    return RunSettings.of_examples(training, answers, prompt, answer, **facts)


def _add_vllm_engine(plan: Plan, training: OnlineConfig) -> Plan:
    """Add the memory of a vLLM engine to a plan, if one generates."""
    if not training.use_vllm:
        return plan
    run = plan.run
    engine_bytes = 0.0
    description = "its server has GPUs of its own"
    if training.vllm_mode == "colocate":
        ranks = training.vllm_tensor_parallel_size
        longest = run.prompt + run.completion
        context = training.vllm_max_model_length or plan.model.context or longest
        sleeps = training.vllm_enable_sleep_mode
        engine = Engine(plan, ranks, context, run.rows * ranks, sleeps)
        share = training.vllm_gpu_memory_utilization
        if share is None:
            engine_bytes = engine.memory(min(longest, context)).total
        else:
            engine_bytes = share * plan.device_bytes
        cache_tokens = (engine_bytes - engine.weights) / engine.token
        weights = format_bytes(engine.weights)
        if cache_tokens <= 0:
            raise ValueError(
                f"vllm_gpu_memory_utilization={share} leaves no room for {weights} of weights on "
                "each GPU: raise it, or vllm_tensor_parallel_size."
            )
        description = f"{weights} of weights, and room for a cache of {cache_tokens:,.0f} tokens"
    run = run.replace(engine_bytes=engine_bytes, engine_sleeps=training.vllm_enable_sleep_mode)
    return replace(plan, run=run, notes=(f"vLLM generates: {description}.",))


def _sharding_settings(
    training: BaseConfig, model_args: ModelConfig, run: RunSettings, sharding: Sharding
) -> dict[str, Any]:
    """Return the settings that follow from how the ranks shard the model."""
    accumulation = getattr(training.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    syncs_each_batch = sharding.is_zero or bool(accumulation.get("sync_each_batch"))
    storage = model_args.bnb_4bit_quant_storage or "uint8"
    changes: dict[str, Any] = {
        "sharding": replace(sharding, syncs=syncs_each_batch),
        "divides_quantized": "float" in storage and not model_args.load_in_8bit,
    }
    uses_half_precision = training.bf16 or training.fp16
    if uses_half_precision and (sharding.is_zero or sharding.is_fsdp):
        # DeepSpeed and FSDP cast the weights themselves, so autocast does not make copies.
        changes |= {"loaded_bytes": run.weight_bytes, "weight_bytes": 2}
    return changes


def _precision_settings(
    training: BaseConfig, model_args: ModelConfig, config: PretrainedConfig
) -> dict[str, Any]:
    """Return the bytes per weight, per operand of a matrix product, and per quantized weight."""
    dtype = _model_init_kwargs(training).get("dtype", model_args.dtype)
    if dtype in (None, "auto"):
        dtype = getattr(config.get_text_config(), "dtype", None) or "float32"
    weight_bytes = _torch_dtype(dtype).itemsize
    matrix_bytes = quantized_bytes(model_args)
    return {
        # The weights that are not quantized are kept in float32.
        "weight_bytes": weight_bytes if matrix_bytes is None else 4,
        "product_bytes": 2 if training.bf16 or training.fp16 else weight_bytes,
        "matrix_bytes": matrix_bytes,
    }


def _model_init_kwargs(training: BaseConfig) -> dict[str, Any]:
    kwargs = training.model_init_kwargs
    return kwargs if isinstance(kwargs, dict) else {}


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else dtype_of_name(dtype)


def _assumption_notes(plan: Plan, script: ScriptArguments, training: BaseConfig) -> list[str]:
    """Return what the plan assumes, and what it does not count."""
    run = plan.run
    context = plan.model.context
    length = run.prompt + run.completion
    notes = []
    is_prompt_given = script.longest_prompt or getattr(training, "max_prompt_length", None)
    if run.prompt and not is_prompt_given:
        notes.append(_assumed_prompt_note(run, context))
    if getattr(script, "reward_model_name_or_path", None) is not None:
        notes.append("The reward model is not counted.")
    if context and length > context:
        rows = "prompt and completion" if run.prompt else "rows"
        notes.append(
            f"The longest {rows} have {length} tokens, more than the model's context of {context}."
        )
    if run.optimizer not in KNOWN_OPTIMIZERS:
        notes.append(f"What {run.optimizer} keeps is unknown; two float32 states are assumed.")
    if not plan.model.gated:
        notes.append("Layers are assumed to be like Llama's, with a gated MLP.")
    return notes


def _assumed_prompt_note(run: RunSettings, context: int | None) -> str:
    rest = ""
    if run.generates and run.prompt < ASSUMED_PROMPT:
        rest = f", what max_completion_length leaves of the model's context of {context}"
    return f"Prompts are assumed to have up to {run.prompt} tokens{rest}; give --longest_prompt."


def _sharding_notes(plan: Plan) -> list[str]:
    """Return advice on what the ranks could shard."""
    run = plan.run
    sharding = run.sharding
    rank = plan.estimate.rank
    notes = []
    if run.processes > 1 and not sharding.stage:
        notes.append(
            "Every rank holds the whole model; --accelerate_config zero2, zero3 or fsdp2 divides "
            "it."
        )
    keeps_whole_gradients = run.accumulation > 1 and rank.waiting > rank.gradients
    if sharding.is_fsdp and keeps_whole_gradients:
        notes.append(
            "FSDP sums whole gradients until the last micro-batch; the accelerator_config option "
            "gradient_accumulation_kwargs={'sync_each_batch': true} divides them each time."
        )
    if sharding.divides_weights and run.matrix_bytes and not run.divides_quantized:
        notes.append(
            "Quantized weights stay whole on every rank; "
            "bnb_4bit_quant_storage=bfloat16 lets them be divided."
        )
    return notes
