"""The policy, its tokenizer and its adapter: loaded, and prepared for training."""

import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
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
from .reference import REFERENCE_ADAPTER
from .unwrap import causal_model, is_peft_model
from .weights import is_quantized

DTYPES = ("auto", "bfloat16", "float16", "float32")
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# They change what an adapter does, and no tensor shows it.
SCALES = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora")
MOST_NAMED = 5
VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")


def load_policy(
    name: str,
    init_kwargs: dict[str, Any] | None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    distributed: bool = False,
    gives_rewards: bool = False,
) -> PreTrainedModel:
    """Load a causal language model with the architecture its configuration names.

    Or a sequence classifier with one label, if it `gives_rewards`. `init_kwargs` are those of
    `from_pretrained`, less a `device_map` where each of several processes has its own device.
    """
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code} | (init_kwargs or {})
    kwargs["dtype"] = kwargs.pop("torch_dtype", kwargs.get("dtype", "float32"))
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] not in DTYPES:
        raise ValueError(
            f"dtype={kwargs['dtype']!r} in model_init_kwargs must be one of {', '.join(DTYPES)}."
        )
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError(
                "Give quantization_config as an argument or in model_init_kwargs, not both."
            )
        kwargs["quantization_config"] = quantization_config
    if distributed and kwargs.get("device_map") is not None:
        warnings.warn(
            "model_init_kwargs: device_map is left out, as each process has its own device.",
            stacklevel=2,
        )
        kwargs["device_map"] = None
    config = load_config(name, kwargs.get("revision"), kwargs["trust_remote_code"])
    kind = architecture(config)
    if gives_rewards:
        if not kwargs.get("ignore_mismatched_sizes"):
            check_one_label(name, config)
        kind, kwargs["num_labels"] = AutoModelForSequenceClassification, 1
    model, report = _from_pretrained(kind, name, kwargs)
    if not gives_rewards:
        _refuse_random_head(name, model, report["missing_keys"])
    return model


def _from_pretrained(
    kind: Any, name: str, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model of a class, and the report on its weights; errors name the model."""
    try:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(
            name, output_loading_info=True, **kwargs
        )
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"The weights of {name!r} have other shapes than its config.json says; the report "
            "above names them. Use the config.json that was saved with them."
        ) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(
            f"The model {name!r} does not take all of its model_init_kwargs: {error}."
        ) from error
    return loaded


def check_one_label(name: str, config: PretrainedConfig, kinds: Iterable[str] = ()) -> None:
    """Refuse a classifier of several classes: none of its outputs is a reward.

    `kinds` are the classes of the model; without them, those that its configuration names.
    """
    kinds = kinds or config.architectures or ()
    if config.num_labels != 1 and any("ForSequenceClassification" in kind for kind in kinds):
        raise ValueError(
            f"The model {name!r} tells {config.num_labels} classes apart (num_labels="
            f"{config.num_labels} in its config.json); a reward model has one label, whose logit "
            "is the reward. Use one that was trained with num_labels=1."
        )


def _refuse_random_head(name: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Refuse a checkpoint without the output projection: no token would be predicted by it."""
    head = model.get_output_embeddings()
    own = {id(weight) for weight in head.parameters()} if head is not None else set()
    weights = dict(model.named_parameters())
    lost = sorted(key for key in missing if key in weights and id(weights[key]) in own)
    if lost:
        raise ValueError(
            f"The model {name!r} has no weights for {', '.join(lost)}, which would be random: it "
            "was saved without what predicts tokens, as by AutoModel. Save it with "
            "AutoModelForCausalLM, or pass a model instead of its name."
        )


def architecture(config: PretrainedConfig) -> Any:
    """The class that a configuration names, if transformers has it as a generator."""
    named = [getattr(transformers, kind, None) for kind in config.architectures or []]
    return next((kind for kind in named if hasattr(kind, "generate")), AutoModelForCausalLM)


def load_config(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Read the configuration of a model, and nothing else; OSError if there is none."""
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
    if not Path(name).is_dir():  # which may hold a tokenizer alone
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
    """Give the tokenizer a pad token, its EOS if it has none, and tell the model; return its id."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("The tokenizer has neither a pad token nor an EOS token; set one.")
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.pad_token_id = tokenizer.pad_token_id
    return tokenizer.pad_token_id


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's EOS and all of the generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    several = configured if isinstance(configured, (list, tuple)) else [configured]
    return tuple(sorted({*several, tokenizer.eos_token_id} - {None}))


def end_with(model: nn.Module, eos: int) -> None:
    """Let the model end what it generates with a token; the others that ended it still do."""
    model.config.get_text_config().eos_token_id = eos
    if (generation := getattr(model, "generation_config", None)) is not None:
        previous = generation.eos_token_id
        previous = previous if isinstance(previous, list) else [previous]
        generation.eos_token_id = [eos, *(i for i in previous if i not in (None, eos))]


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set the probability of every dropout to zero: of modules, and those that layers hold."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                vars(module)[name] = 0.0


def context_length(model: PreTrainedModel) -> int | None:
    """The most tokens the model can see, or None if its configuration does not say."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most if most is None or most > 0 else None  # -1 stands for no limit


def model_bounds(model: nn.Module) -> ModelBounds:
    """What a policy, perhaps with an adapter, can read.

    Its context is not known if its rotary embedding is scaled: it may be made for longer rows.
    """
    causal = causal_model(model)
    config = causal.config.get_text_config()
    context = None if rotary_kinds(config) - {"default"} else context_length(causal)
    return ModelBounds(config.vocab_size, context)


def rotary_kinds(config: PretrainedConfig) -> set[str]:
    """How rotary embeddings are scaled, by all kinds of layers: "default" stands for not at all."""
    parameters = getattr(config, "rope_parameters", None) or {}
    layers = [parameters] if "rope_type" in parameters else parameters.values()
    return {layer["rope_type"] for layer in layers if isinstance(layer, dict)}


@contextmanager
def _without_old_name() -> Iterator[None]:
    """Silence the warning about a name that peft uses and transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        yield


@_without_old_name()
def add_adapter(model: PreTrainedModel, peft_config: Any) -> nn.Module:
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
        peft_config.task_type = "SEQ_CLS"  # for which peft also trains the layer of the score
    from .adapter_targets import check_adapter_modules  # few runs need it

    check_adapter_modules(model, peft_config)
    return peft.get_peft_model(_prepare_base(model), peft_config)


def trainable(model: nn.Module) -> nn.Module:
    """Return the model, unless all of it is frozen."""
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
    """Name and revision of the model that a stored adapter was trained on; None: it is a model."""
    check_model_name(name, revision)
    found = None
    if not (Path(name) / "config.json").exists() and is_available("peft"):
        with suppress(OSError):  # neither a folder nor reachable, which loading says better
            found = find_adapter_config_file(name, revision=revision)
    if found is None:
        return None
    config = require("peft", "the adapter").PeftConfig.from_pretrained(name, revision=revision)
    if not config.base_model_name_or_path:
        raise ValueError(
            f"The adapter {name!r} does not say which model it belongs to. Load that model, apply "
            "PeftModel.from_pretrained(model, folder, is_trainable=True), and pass the result."
        )
    return config.base_model_name_or_path, config.revision


@_without_old_name()
def load_adapter(model: PreTrainedModel, name: str, revision: str | None = None) -> nn.Module:
    """Put a stored adapter on its base model, to be trained further."""
    kind, base = require("peft", "the adapter").PeftModel, _prepare_base(model)
    return kind.from_pretrained(base, name, is_trainable=True, revision=revision)


@contextmanager
def storing_adapters_only(model: nn.Module) -> Iterator[None]:
    """Inside, adapters of embedding and head are stored without its matrix unless it has grown."""
    own: dict[str, Any] = vars(model)
    if is_peft_model(model) and not _has_grown(model):
        own["save_pretrained"] = partial(model.save_pretrained, save_embedding_layers=False)
    try:
        yield
    finally:
        own.pop("save_pretrained", None)


def check_adapters(model: Any, folder: str | Path) -> None:
    """Refuse a checkpoint whose adapters are not those of the model, which may have none."""
    folder = Path(folder)
    stored = {"default": folder} if (folder / CONFIG).exists() else {}
    stored |= {path.parent.name: path.parent for path in folder.glob(f"*/{CONFIG}")}
    trained = model.peft_config if is_peft_model(model) else {}
    _check_names(folder, trained.keys(), stored.keys())
    for name, config in trained.items():
        path, ours = stored[name] / CONFIG, config.to_dict()
        theirs = json.loads(path.read_text(encoding="utf-8"))
        for option in SCALES:
            if ours.get(option) != theirs.get(option):
                raise ValueError(
                    f"{path}: {option} is {theirs.get(option)!r}, but {ours.get(option)!r} in the "
                    f"adapter {name!r} of the model; resume with the options of the run."
                )
        _check_tensors(model, name, stored[name] / WEIGHTS)


def _check_names(folder: Path, trained: Set[str], stored: Set[str]) -> None:
    if stored and not trained:
        raise ValueError(
            f"{folder} holds an adapter, but the model has none: give the peft_config "
            "(--use_peft) or the adapter that the run was started with."
        )
    if trained and not stored:
        raise ValueError(f"{folder} holds no adapter, but the model has one: leave it out.")
    if trained != stored:
        both = trained - stored, stored - trained
        missing, extra = (", ".join(sorted(names)) or "none" for names in both)
        raise ValueError(
            f"{folder}: the adapters differ from those of the model. Missing: {missing}; "
            f"unexpected: {extra}. {REFERENCE_ADAPTER!r} is the frozen copy of an adapter that "
            "serves as reference; it does not exist if beta is 0."
        )


def _check_tensors(model: Any, name: str, path: Path) -> None:
    """Compare names and shapes in a file with those that would be stored."""
    if not path.exists():
        raise ValueError(f"{path} is missing from the checkpoint.")
    with safe_open(str(path), framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    state, with_matrix = model.state_dict(keep_vars=True), _has_grown(model)
    collect = require("peft", "the adapter").get_peft_model_state_dict
    found = collect(model, state, adapter_name=name, save_embedding_layers=with_matrix)
    # ZeRO-3 keeps the shape of a parameter beside the part of it that is here.
    expected = _described({key: getattr(x, "ds_shape", x.shape) for key, x in found.items()})
    stored = _described(shapes)
    problems = {"missing": sorted(expected - stored), "unexpected": sorted(stored - expected)}
    words = []
    for kind, names in problems.items():
        rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        words += [f"{kind}: {', '.join(names[:MOST_NAMED])}{rest}"] if names else []
    if words:
        raise ValueError(f"{path} does not fit the adapter of the model. {'; '.join(words)}.")


def _described(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    return {f"{name} ({'x'.join(map(str, shape))})" for name, shape in shapes.items()}


def _has_grown(model: Any) -> bool:
    """Whether the vocabulary was enlarged after the base model was loaded."""
    try:
        stored, _ = PretrainedConfig.get_config_dict(model.config.name_or_path)
    except (OSError, ValueError):  # made in memory, so there is nothing to compare with
        return False
    return stored.get("vocab_size", model.config.vocab_size) != model.config.vocab_size
