"""The trained model with its tokenizer and adapter, the reference, and the checks of them all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import nn
from torch.optim import Optimizer
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from ...data.formats import refuse_media_columns
from ...imports import untested_version_warning
from ...models import loading
from ...models.adapter_files import CONFIG
from ...models.causality import refuse_encoder
from ...models.lm_head import cast_head_to_float32
from ...models.patches import attention_implementation
from ...models.unwrap import is_peft_model
from ...models.weights import keep_trainable
from ...sources import offline_variable
from ...suggestions import did_you_mean
from .base_config import BaseConfig

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

logger = logging.get_logger(__name__)

Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None
TrainDataset: TypeAlias = Dataset | IterableDataset
# One set, several by name, or the name of one of those.
EvalDataset: TypeAlias = TrainDataset | dict[str, TrainDataset] | str | None

# How to make a dataset of what is mistaken for one, by the name of its class.
DATASET_MAKERS = {
    "DataFrame": "Dataset.from_pandas",
    "dict": "Dataset.from_dict",
    "list": "Dataset.from_list",
}


@dataclass(frozen=True)
class Policy:
    """A policy ready to be handed to the trainer."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    had_adapter: bool  # whether the model had an adapter before options added one


def prepare_policy(
    model: str | PreTrainedModel,
    args: BaseConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization_config: "QuantizationConfigMixin | None" = None,
    peft_config: "PeftConfig | None" = None,
    change: Callable[[nn.Module, PreTrainedTokenizerBase], None] = lambda *_: None,
) -> Policy:
    """Load what was given by name, and `change` it by options, before an adapter is added."""
    given_kwargs: Any = args.model_init_kwargs or {}
    init_kwargs = dict(given_kwargs)
    set_seed(args.seed)  # for what is drawn: weights of a new head, factors of a new adapter
    if isinstance(model, str):
        name = model
        model = _load(name, args, init_kwargs, quantization_config, peft_config)
    else:
        _check_kind("model", model)
        given = {"model_init_kwargs": init_kwargs, "quantization_config": quantization_config}
        if ignored := [name for name, value in given.items() if value]:
            logger.warning(f"{' and '.join(ignored)} ignored: the given model is already loaded.")
        name = model.config.name_or_path
    _check_model(model, args)
    source = _tokenizer_source(name, model)
    tokenizer = _resolve_tokenizer(tokenizer, source, args, init_kwargs)
    loading.settle_pad_token(model, tokenizer)
    change(model, tokenizer)
    if len(tokenizer) > (known := model.config.get_text_config().vocab_size):
        logger.warning(
            f"The tokenizer has {len(tokenizer):,} tokens, and the model knows {known:,}: rows "
            "with one of the others will fail. Call model.resize_token_embeddings(len(tokenizer))."
        )
    had_adapter = is_peft_model(model)
    keep_trainable(model)
    if args.cast_lm_head_to_fp32:
        cast_head_to_float32(model)
    if peft_config is not None or had_adapter:
        model = _with_adapter(model, peft_config, args)
    if args.disable_dropout:
        loading.disable_dropout_in_model(model)
    return Policy(loading.trainable(model), tokenizer, had_adapter)


def _load(
    name: str,
    args: BaseConfig,
    init_kwargs: dict[str, Any],
    quantization: "QuantizationConfigMixin | None",
    peft_config: "PeftConfig | None",
) -> nn.Module:
    revision = init_kwargs.get("revision")
    adapter, base = name, loading.adapter_base(name, revision)
    if base is not None:
        if peft_config is not None:
            raise ValueError(
                f"{name!r} is an adapter, which will be trained further: leave out peft_config "
                "(--use_peft), or give the model below it."
            )
        name, init_kwargs["revision"] = base
    is_quantized = quantization or init_kwargs.get("quantization_config")
    if is_quantized and peft_config is None and base is None:
        raise ValueError(
            "Quantized weights cannot be trained: add an adapter with peft_config (--use_peft), "
            "or leave the quantization out."
        )
    facts = {"distributed": args.world_size > 1, "gives_rewards": args.trains_reward_model}
    load = partial(loading.load_policy, name, init_kwargs, args.trust_remote_code, quantization)
    if base is None:
        return load(**facts)
    try:
        model = load(**facts)
    except OSError as error:
        raise OSError(
            f"The adapter {adapter!r} was trained on a model that cannot be loaded. {error} If it "
            f"has moved, set base_model_name_or_path in {Path(adapter, CONFIG)} to where "
            "it is now."
        ) from error
    return loading.load_adapter(model, adapter, revision)


def _with_adapter(
    model: nn.Module, peft_config: "PeftConfig | None", args: BaseConfig
) -> nn.Module:
    model = loading.add_adapter(model, peft_config) if peft_config else model
    if args.gradient_checkpointing and model.active_peft_config.peft_type == "PREFIX_TUNING":
        raise ValueError("Prefix tuning needs gradient_checkpointing=False: its prefix is a cache.")
    if args.learning_rate == type(args).__dataclass_fields__["learning_rate"].default:
        logger.warning(
            f"learning_rate={args.learning_rate:g} is the default for training all weights. "
            "Adapters usually learn with ten times as much or more."
        )
    return model


def _check_kind(name: str, model: object) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        kind = type(model).__name__
        if isinstance(model, type):
            kind = f"the class {model.__name__}; load one with {model.__name__}.from_pretrained"
        raise TypeError(f"{name} must be a name or a transformers model, not {kind}.")


def _check_model(model: PreTrainedModel, args: BaseConfig) -> None:
    kind, head = type(model).__name__, model.get_output_embeddings()
    if head is None and not args.trains_reward_model:
        raise TypeError(f"{kind} predicts no tokens: load the model with AutoModelForCausalLM.")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{kind} is an encoder-decoder. Only models that continue their prompt "
            "can be trained here, such as those of AutoModelForCausalLM."
        )
    if head is not None:
        refuse_encoder(model)
    # Eager attention softmaxes in float32, where the mask value of float64 becomes -inf.
    if model.dtype == torch.float64 and attention_implementation(model.config) == "eager":
        raise ValueError("Eager attention in float64 gives NaN: use attn_implementation='sdpa'.")


def _tokenizer_source(name: str, model: nn.Module) -> str:
    """Where the tokenizer is: with the model, or with the base of an adapter saved without one."""
    if is_peft_model(model) and Path(name).is_dir() and not loading.has_tokenizer(name):
        return str(model.config.name_or_path)
    return name


def _resolve_tokenizer(
    tokenizer: object, name: str, args: BaseConfig, init_kwargs: dict[str, Any]
) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        if not name:
            raise ValueError(
                "The model does not say where it was loaded from: pass its tokenizer as "
                "processing_class."
            )
        return loading.load_tokenizer(name, init_kwargs.get("revision"), args.trust_remote_code)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        images = " Pass its tokenizer to train on text." * isinstance(tokenizer, ProcessorMixin)
        kind = type(tokenizer).__name__
        raise TypeError(f"processing_class must be a tokenizer, not {kind}.{images}")
    return tokenizer


def router_coefficient(model: nn.Module, args: BaseConfig) -> float:
    """Weight of the load-balancing loss: the option, else the model's configuration, else 0."""
    config = model.config.get_text_config()
    has_router = hasattr(config, "output_router_logits")
    if args.router_aux_loss_coef is None:
        return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if has_router else 0.0
    if args.router_aux_loss_coef and not has_router:
        raise ValueError(
            f"router_aux_loss_coef={args.router_aux_loss_coef}: "
            f"{type(config).__name__} is not a mixture of experts; leave the option out."
        )
    return float(args.router_aux_loss_coef)


def check_dataset(name: str, dataset: object) -> None:
    """Check the kind of a dataset; `name` is what messages call it."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        kind = type(dataset).__name__
        advice = f" Make one with {DATASET_MAKERS[kind]}." if kind in DATASET_MAKERS else ""
        if isinstance(dataset, DatasetDict | IterableDatasetDict):
            advice = f" Choose one of {', '.join(dataset)}."
        raise TypeError(
            f"{name} must be a datasets.Dataset or IterableDataset, not {kind}.{advice}"
        )
    if isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError(f"{name} has no rows.")
    refuse_media_columns(name, dataset.column_names or ())


def checked_args(
    model: object, args: TrainingArguments | None, config_class: type[BaseConfig], method: str = ""
) -> Any:
    """Return the configuration of a run, made from plain `TrainingArguments` if it is given those.

    By default the output folder is named after model and method.
    """
    if (warning := untested_version_warning("transformers")) is not None:
        logger.warning_once(warning)
    config = getattr(model, "config", None)
    name = model if isinstance(model, str) else getattr(config, "name_or_path", "")
    if args is None:
        args = config_class(f"{name.rstrip('/').split('/')[-1]}-{method.replace(' ', '')}")
    if isinstance(args, TrainingArguments) and not isinstance(args, BaseConfig):
        from .plain_arguments import config_of  # few runs need it

        args = config_of(args, config_class)
    if not isinstance(args, config_class):
        raise TypeError(
            f"args must be an instance of {config_class.__name__}, not {_kind_of(args)}."
        )
    if args.n_gpu > 1:  # in one process, which transformers would divide batches over
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs. Start one process for each with `accelerate "
            "launch`, or limit it to one with CUDA_VISIBLE_DEVICES=0."
        )
    _check_output_dir(name, args.output_dir)
    if args.push_to_hub and (variable := offline_variable()) is not None:
        raise ValueError(
            f"push_to_hub=True cannot be used: {variable} switches the hub off. Leave push_to_hub "
            "out, or unset that variable; a finished run is uploaded by `hf upload REPOSITORY "
            f"{args.output_dir}`."
        )
    return args


def _kind_of(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return f"of {type(value).__name__}"


def _check_output_dir(name: str, output: str | None) -> None:
    folder = Path(name).expanduser()
    if name and output and folder.is_dir() and folder.resolve() == Path(output).resolve():
        raise ValueError(
            f"output_dir={output!r} is the folder of the model, which would be replaced. Choose "
            "another one."
        )


def check_name(chosen: object, sets: object) -> None:
    """Check that a name of an evaluation set is one of several sets."""
    names = list(sets) if isinstance(sets, dict) else []
    if isinstance(chosen, str) and chosen not in names:
        hint = did_you_mean(chosen, names, f" Its names: {', '.join(names) or 'none'}.")
        raise ValueError(f"eval_dataset has no {chosen!r}.{hint}")


def check_additions(callbacks: object, optimizers: object) -> None:
    """Check the kinds of the arguments `callbacks` and `optimizers` of a trainer."""
    if not isinstance(callbacks, list | tuple | None):
        raise TypeError(f"callbacks must be a list of callbacks, not {callbacks!r:.80}.")
    for place, callback in enumerate(callbacks or ()):
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise TypeError(
                f"callbacks[{place}] must be a transformers.TrainerCallback, not {callback!r:.80}."
            )
    if not isinstance(optimizers, list | tuple) or len(optimizers) != 2:
        raise TypeError(
            "optimizers must be a pair (optimizer, scheduler), with None for what the trainer "
            f"should make, not {type(optimizers).__name__}."
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse an optimizer that holds other weights than those that are trained."""
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    groups = getattr(optimizer, "param_groups", None)  # DeepSpeed's placeholders have none
    if groups and trained.isdisjoint(id(weight) for group in groups for weight in group["params"]):
        raise ValueError(
            "optimizers: the optimizer holds none of the weights that are trained. Make it from "
            "the parameters of the model that you pass, after adapters were added."
        )


def load_reference(
    given: str | nn.Module | None, model: str | nn.Module, args: BaseConfig
) -> PreTrainedModel | None:
    """The reference that a trainer was given, loaded if it was given by name; None if none was."""
    if given is None:
        return None
    if given is model and not isinstance(given, str):
        raise ValueError(
            "ref_model is the model that is trained, so it would move along. Leave it out: a "
            "frozen copy is made."
        )
    if isinstance(given, str):
        init_kwargs: Any = args.ref_model_init_kwargs or args.model_init_kwargs or {}
        options = dict(init_kwargs)
        trust = args.trust_remote_code
        many = args.world_size > 1
        given = loading.load_policy(given, options, trust, distributed=many)
    _check_kind("ref_model", given)
    loading.disable_dropout_in_model(given)
    return given
