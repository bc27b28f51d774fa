"""Loading a policy and its tokenizer from a name, and preparing them for training."""

from __future__ import annotations

import warnings
from typing import Any

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

DTYPES = ("auto", "bfloat16", "float16", "float32")


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
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": "float32"}
    kwargs |= init_kwargs or {}
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] not in DTYPES:
        raise ValueError(
            f"dtype={kwargs['dtype']!r} in model_init_kwargs must be one of {', '.join(DTYPES)}."
        )
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError(
                "quantization_config was given both as an argument and in model_init_kwargs."
            )
        kwargs["quantization_config"] = quantization_config
    if distributed and kwargs.get("device_map") is not None:
        warnings.warn(
            "model_init_kwargs: device_map is left out, as each process has its own device.",
            stacklevel=2,
        )
        kwargs["device_map"] = None
    config = load_config(name, kwargs.get("revision"), kwargs["trust_remote_code"])
    kind = _architecture(config)
    if gives_rewards:
        kind, kwargs["num_labels"] = AutoModelForSequenceClassification, 1
    return kind.from_pretrained(name, **kwargs)


def _architecture(config: PretrainedConfig) -> Any:
    """The class that a configuration names, if transformers has it as a generator."""
    named = [getattr(transformers, kind, None) for kind in config.architectures or []]
    return next((kind for kind in named if hasattr(kind, "generate")), AutoModelForCausalLM)


def load_config(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Read the configuration of a model, and nothing else; OSError if there is none."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        return AutoConfig.from_pretrained(name, **options)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"The model {name!r} is neither a folder with a config.json nor on the hub: {reason}"
        ) from error


def load_tokenizer(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a policy, padding on the left."""
    return AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=trust_remote_code, padding_side="left"
    )


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


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set the probability of every dropout to zero: of modules, and those that layers hold."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                vars(module)[name] = 0.0


def context_length(model: PreTrainedModel) -> int | None:
    """Most tokens the model can see, or None if its configuration does not say."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most if most is None or most > 0 else None  # -1 stands for no limit
