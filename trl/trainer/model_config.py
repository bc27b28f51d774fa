"""Options that describe the model on the command line."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..imports import require
from ..models.adapter_targets import split_names
from ..models.loading import DTYPES, dtype_of_name
from ..options import changed_options, option
from .base.keyword_arguments import StrictKeywordArguments
from .base.options import check_options

ADAPTER_OPTIONS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "lora_task_type",
    "use_rslora",
    "use_dora",
)


@dataclass
class ModelConfig(StrictKeywordArguments):
    """Which model is trained, in which precision, with which adapter."""

    legacy_options = {"torch_dtype": "dtype"}

    model_name_or_path: str | None = option(None, "Folder or hub id of the model.")
    model_revision: str = option("main", "Branch, tag or commit of the model.")
    tokenizer_name_or_path: str | None = option(
        None, "Folder or hub id of the tokenizer. None: that of the model."
    )
    dtype: str | None = option(
        "float32", "Precision to load weights in; auto keeps that of the files.", choices=DTYPES
    )
    attn_implementation: str | None = option(None, "Attention implementation.")
    use_peft: bool = option(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = option(16, "Rank of the adapter.", ge=1)
    lora_alpha: int = option(32, "Scale of the adapter, which is divided by its rank.", gt=0)
    lora_dropout: float = option(0.05, "Dropout of the adapter's input.", ge=0, lt=1)
    lora_target_modules: list[str] | str | None = option(
        None, "Modules that get an adapter; all-linear for every linear layer."
    )
    lora_target_parameters: list[str] | None = option(
        None, "Parameters that get an adapter, such as the weights of experts."
    )
    lora_modules_to_save: list[str] | None = option(None, "Modules trained in full.")
    lora_task_type: str = option("CAUSAL_LM", "Task the adapter is for.")
    use_rslora: bool = option(False, "Divide lora_alpha by the root of the rank (rsLoRA).")
    use_dora: bool = option(False, "Decompose weights into magnitude and direction (DoRA).")
    load_in_8bit: bool = option(False, "Quantize the base model to 8 bits.")
    load_in_4bit: bool = option(False, "Quantize the base model to 4 bits.")
    bnb_4bit_quant_type: str = option("nf4", "Data type of 4-bit weights.", choices=("nf4", "fp4"))
    use_bnb_nested_quant: bool = option(False, "Quantize the quantization constants too.")
    bnb_4bit_quant_storage: str | None = option(None, "Data type that holds 4-bit weights.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit exclude each other; choose one.")
        if self.lora_target_parameters and self.lora_dropout:
            raise ValueError(
                f"lora_target_parameters cannot be used with lora_dropout={self.lora_dropout}: "
                "dropout cannot act on the input of a parameter. Set lora_dropout=0."
            )
        self.lora_target_modules = _module_names(self.lora_target_modules)
        self.lora_target_parameters = _split_all(self.lora_target_parameters)
        self.lora_modules_to_save = _split_all(self.lora_modules_to_save)


def _split_all(texts: list[str] | None) -> list[str] | None:
    """Split each text at its commas into names."""
    if texts is None:
        return None
    return [name for text in texts for name in split_names(text)]


def _module_names(targets: list[str] | str | None) -> list[str] | str | None:
    """A list of names, also of those in one text with commas; all-linear or a pattern as text."""
    if targets is None:
        return None
    texts = [targets] if isinstance(targets, str) else targets
    names = [name for text in texts for name in split_names(text)]
    is_text = len(names) == 1 and not re.fullmatch(r"[\w.]+", names[0])
    return names[0] if is_text else names


def get_peft_config(model_args: ModelConfig) -> Any:
    """Describe the LoRA adapter of the options, for which peft must be installed; None without one.

    Options of an adapter without `use_peft` are a ValueError.
    """
    if not model_args.use_peft:
        check_adapter_options(model_args)
        return None
    return require("peft", "use_peft").LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def check_adapter_options(model_args: ModelConfig, written: Collection[str] = ()) -> None:
    """Refuse options of a LoRA adapter without `use_peft`, with which all weights would be trained.

    These are options that differ from their default, and those `written` on the command line or in
    its file, whatever their value.
    """
    if model_args.use_peft:
        return
    names_in_use = {*changed_options(model_args, ADAPTER_OPTIONS), *written}
    names = [name for name in ADAPTER_OPTIONS if name in names_in_use]
    if names:
        options = ", ".join(f"{name}={vars(model_args)[name]!r}" for name in names)
        raise ValueError(
            f"{options}: no effect without an adapter, and all weights would be trained. To train "
            f"an adapter, add --use_peft (use_peft in Python), or leave out {', '.join(names)}."
        )


def tokenizer_source(model_args: ModelConfig) -> tuple[str, str | None]:
    """Name and revision of the tokenizer."""
    if model_args.tokenizer_name_or_path is not None:
        return model_args.tokenizer_name_or_path, None
    return model_args.model_name_or_path or "", model_args.model_revision


def get_quantization_config(model_args: ModelConfig) -> Any:
    """Describe the quantization of the options, which takes bitsandbytes; None without any."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    require("bitsandbytes", "load_in_4bit and load_in_8bit")
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    dtype = model_args.dtype
    compute_dtype = None if dtype in (None, "auto") else dtype_of_name(dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )
