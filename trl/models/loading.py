"""Load the policy, its tokenizer and its adapter, and prepare them for training."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.peft_utils import find_adapter_config_file

from ..data.bounds import ModelBounds
from ..imports import is_available, require
from ..sources import check_model_name, raise_if_missing
from .adapter_files import (
    check_adapter_weights,
    first_mismatch,
    read_adapter_config,
)
from .loaded_weights import check_one_label, from_pretrained, refuse_random_head
from .unwrap import causal_model, is_peft_model
from .weights import is_quantized

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

DTYPES = ("auto", "bfloat16", "float16", "float32")
MOST_NAMED = 5
VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")


def dtype_of_name(name: str) -> torch.dtype:
    """Return the data type that torch calls by a name, such as "bfloat16"."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def checked_dtype(dtype: object) -> object:
    """Return a `dtype` of model_init_kwargs; a ValueError if it is a name that is not known."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype!r} in model_init_kwargs must be one of {', '.join(DTYPES)}."
        )
    return dtype


def load_policy(
    name: str,
    init_kwargs: dict[str, Any] | None,
    trust_remote_code: bool = False,
    quantization_config: "QuantizationConfigMixin | None" = None,
    distributed: bool = False,
    gives_rewards: bool = False,
) -> PreTrainedModel:
    """Load a causal language model with the architecture that its configuration names.

    With `gives_rewards`, load a sequence classifier with one label instead. `init_kwargs` are
    passed to `from_pretrained`, except for a `device_map` if training is `distributed`, where each
    process has its own device.
    """
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code} | (init_kwargs or {})
    kwargs["dtype"] = checked_dtype(kwargs.pop("torch_dtype", kwargs.get("dtype", "float32")))
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError(
                "Give quantization_config as an argument or in model_init_kwargs, not both."
            )
        kwargs["quantization_config"] = quantization_config
    if distributed and kwargs.get("device_map") is not None:
        warnings.warn(
            "model_init_kwargs: device_map is ignored, because each process has its own device.",
            stacklevel=2,
        )
        kwargs["device_map"] = None
    config = load_config(name, kwargs.get("revision"), kwargs["trust_remote_code"])
    model_class = architecture(config)
    if gives_rewards:
        if not kwargs.get("ignore_mismatched_sizes"):
            check_one_label(name, config)
        model_class = AutoModelForSequenceClassification
        kwargs["num_labels"] = 1
    model, report = from_pretrained(model_class, name, kwargs)
    if not gives_rewards:
        refuse_random_head(name, model, report["missing_keys"])
    return model


def architecture(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the model class that a configuration names, if transformers has it.

    If it has none that can generate, return `AutoModelForCausalLM`.
    """
    for class_name in config.architectures or []:
        model_class: type[PreTrainedModel] | None = getattr(transformers, class_name, None)
        if model_class is not None and hasattr(model_class, "generate"):
            return model_class
    default: type[PreTrainedModel] = AutoModelForCausalLM
    return default


def load_config(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Read the configuration of a model without its weights; OSError if there is none."""
    check_model_name(name, revision)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return AutoConfig.from_pretrained(name, **options)
    except OSError as error:
        raise_if_missing(name)
        raise OSError(f"The model {name!r}: {str(error).splitlines()[0]}") from error


def load_tokenizer(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a policy, padding on the left; OSError if there is none."""
    if not Path(name).is_dir():  # a folder may hold only a tokenizer
        check_model_name(name, revision)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left", **options)
    except (OSError, ValueError) as error:
        if Path(name).is_dir() and not has_tokenizer(name):
            raise FileNotFoundError(
                f"The model folder {name!r} has no tokenizer: tokenizer.json is missing. Copy it "
                "and tokenizer_config.json from the model that it was trained from, or give that "
                "model's name (--tokenizer_name_or_path; in Python, a processing_class)."
            ) from error
        raise_if_missing(name)
        raise


def has_tokenizer(folder: str) -> bool:
    """Whether a folder holds the vocabulary of a tokenizer."""
    return any(any(Path(folder).glob(pattern)) for pattern in VOCABULARIES)


def settle_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Set the pad token of tokenizer and model, by default the EOS token; return its id."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("The tokenizer has neither a pad token nor an EOS token; set one.")
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.pad_token_id = tokenizer.pad_token_id
    pad_token_id: int = tokenizer.pad_token_id
    return pad_token_id


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all tokens that end a completion: of the tokenizer and the generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    configured_ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return tuple(sorted({*configured_ids, tokenizer.eos_token_id} - {None}))


def end_with(model: nn.Module, eos: int) -> None:
    """Make a token the EOS token of the model; in generation, earlier ones still end a text."""
    model.config.get_text_config().eos_token_id = eos
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        previous = generation_config.eos_token_id
        previous = previous if isinstance(previous, list) else [previous]
        generation_config.eos_token_id = [eos, *(i for i in previous if i not in (None, eos))]


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set every dropout probability to 0: of dropout modules, and attributes of other modules."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                vars(module)[name] = 0.0


def context_length(model: PreTrainedModel) -> int | None:
    """Return the most tokens the model can see; None if its configuration does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if limit is None or limit > 0 else None  # -1 means no limit


def model_bounds(model: nn.Module) -> ModelBounds:
    """Return vocabulary size and context length of a policy, which may have an adapter.

    The context length is None, unknown, if the rotary embedding is scaled: rows may be longer.
    """
    causal = causal_model(model)
    config = causal.config.get_text_config()
    context = None if rotary_types(config) - {"default"} else context_length(causal)
    return ModelBounds(config.vocab_size, context)


def rotary_types(config: PretrainedConfig) -> set[str]:
    """Return the types of rotary scaling of all layers; "default" means no scaling."""
    parameters = getattr(config, "rope_parameters", None) or {}
    layers = [parameters] if "rope_type" in parameters else parameters.values()
    return {layer["rope_type"] for layer in layers if isinstance(layer, dict)}


@contextmanager
def _without_deprecation_warning() -> Iterator[None]:
    """Silence transformers' warning about a deprecated attribute that peft uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        yield


@_without_deprecation_warning()
def add_adapter(model: PreTrainedModel, peft_config: "PeftConfig") -> nn.Module:
    """Wrap a base model with the adapter that `peft_config` describes."""
    peft = require("peft", "peft_config")
    if not isinstance(peft_config, peft.PeftConfig):
        raise TypeError(f"peft_config must be a peft.PeftConfig, not {type(peft_config).__name__}.")
    if is_peft_model(model):
        raise ValueError(
            "The model already has an adapter: pass it without peft_config to continue training "
            "that adapter, or merge it first."
        )
    if not model.can_generate() and peft_config.task_type in (None, "CAUSAL_LM"):
        peft_config = copy.deepcopy(peft_config)
        peft_config.task_type = "SEQ_CLS"  # then peft also trains the score layer
    from .adapter_targets import check_adapter_modules  # only needed with adapters

    check_adapter_modules(model, peft_config)
    return peft.get_peft_model(_prepare_base(model), peft_config)


def trainable(model: nn.Module) -> nn.Module:
    """Return the model; a ValueError if all its weights are frozen."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "Nothing in the model can be trained: all its weights are frozen, as if loaded for "
            "inference. Load adapters with PeftModel.from_pretrained(..., is_trainable=True)."
        )
    return model


def _prepare_base(model: PreTrainedModel) -> PreTrainedModel:
    if not is_quantized(model):
        return model
    prepare = require("peft", "peft_config").prepare_model_for_kbit_training
    return prepare(model, use_gradient_checkpointing=False)


def adapter_base(name: str, revision: str | None = None) -> tuple[str, str | None] | None:
    """Return (name, revision) of the base model of a stored adapter; None for a whole model."""
    check_model_name(name, revision)
    adapter_config_file = None
    if not (Path(name) / "config.json").exists() and is_available("peft"):
        with suppress(OSError):  # no folder and no repository: loading raises a better error
            adapter_config_file = find_adapter_config_file(name, revision=revision)
    if adapter_config_file is None:
        return None
    config = read_adapter_config(name, revision)
    check_adapter_weights(Path(name))
    if not config.base_model_name_or_path:
        raise ValueError(
            f"The adapter {name!r} does not say which model it belongs to. Load that model, apply "
            "PeftModel.from_pretrained(model, folder, is_trainable=True), and pass the result."
        )
    return config.base_model_name_or_path, config.revision


@_without_deprecation_warning()
def load_adapter(model: PreTrainedModel, name: str, revision: str | None = None) -> nn.Module:
    """Load a stored adapter onto its base model, for further training."""
    peft_model = require("peft", "the adapter").PeftModel
    base = _prepare_base(model)
    try:
        return peft_model.from_pretrained(base, name, is_trainable=True, revision=revision)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise ValueError(
            f"The adapter {name!r} does not fit the model {model.config.name_or_path!r}: "
            f"{first_mismatch(error)}."
        ) from error


@contextmanager
def storing_adapters_only(model: nn.Module) -> Iterator[None]:
    """Inside, `save_pretrained` does not store embedding matrices, unless the vocabulary grew.

    Otherwise peft would store the base model's matrix beside an adapter of embedding or head.
    """
    attributes: dict[str, Any] = vars(model)
    if is_peft_model(model) and not vocabulary_has_grown(model):
        attributes["save_pretrained"] = partial(model.save_pretrained, save_embedding_layers=False)
    try:
        yield
    finally:
        attributes.pop("save_pretrained", None)


def vocabulary_has_grown(model: nn.Module) -> bool:
    """Whether the vocabulary was enlarged after the base model was loaded."""
    try:
        stored, _ = PretrainedConfig.get_config_dict(model.config.name_or_path)
    except (OSError, ValueError):  # created in memory: there is nothing to compare with
        return False
    vocabulary: int = model.config.vocab_size
    return bool(stored.get("vocab_size", vocabulary) != vocabulary)
