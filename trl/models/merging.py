"""Merge a stored adapter into the weights of its base model."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..imports import require
from . import loading
from .adapter_files import first_mismatch
from .patches import forget_one_way_conversions
from .stored_adapter import StoredAdapter
from .weights import is_adapter_layer

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import BitsAndBytesConfig

MERGE_RECORD = "merge.json"  # written into each merged model; marks a folder that may be replaced
# Values of `init_lora_weights` that change base weights at random or by data: not reproducible.
UNREPEATABLE_STARTS = ("pissa_niter", "corda", "lora_ga")
# Values that change base weights in a reproducible way, if computed in float32.
REPEATABLE_STARTS = ("pissa", "olora", "loftq")
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MergedModel:
    """A model with an adapter merged in, and messages for the user."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    notices: list[str]


def merge_adapter(
    adapter: StoredAdapter,
    dtype: str = "auto",
    device: str = "cpu",
    full_precision: bool = False,
    trust_remote_code: bool = False,
) -> MergedModel:
    """Load the base model of an adapter and merge the adapter into its weights.

    If the base model was quantized during training, it is quantized in the same way and then
    dequantized, so that the result computes what was trained; with `full_precision` its weights are
    used as stored. Each layer is merged in float32. `dtype` is that of the result; "auto" is that
    of the stored base model.

    Raises ValueError if adapter and base model do not fit.
    """
    if adapter.start.startswith(UNREPEATABLE_STARTS):
        raise ValueError(
            f"init_lora_weights={adapter.start!r} moved a part of the base weights into the "
            "adapter, and no file says which. Merge in the process that trained it, with "
            "model.merge_and_unload()."
        )
    model, notices = _load_base(adapter, dtype, full_precision, trust_remote_code)
    saved_dtype = model.dtype if dtype == "auto" else loading.dtype_of_name(dtype)
    if adapter.start.startswith(REPEATABLE_STARTS):
        model.float()
    merged = _merge(_attach(model.to(device), adapter)).to(saved_dtype)
    tokenizer = _load_tokenizer(adapter, trust_remote_code)
    if tokenizer is None:
        notices.append("Neither the adapter nor its base model has a tokenizer: none is written.")
    else:
        loading.settle_pad_token(merged, tokenizer)
        if tokenizer.eos_token_id is not None:
            loading.end_with(merged, tokenizer.eos_token_id)
    return MergedModel(merged, tokenizer, notices)


def _load_base(
    adapter: StoredAdapter, dtype: str, full_precision: bool, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[str]]:
    """Load the base model of an adapter, resized to its vocabulary and labels; return notices."""
    name = adapter.base_model
    try:
        config = loading.load_config(name, adapter.revision, trust_remote_code)
    except OSError as error:
        raise FileNotFoundError(
            f"The base model of the adapter cannot be loaded; if it was moved, give its folder as "
            f"--base_model. {error}"
        ) from error
    options: dict[str, Any] = {
        "dtype": "float32" if dtype == "float32" else "auto",
        "revision": adapter.revision,
        "trust_remote_code": trust_remote_code,
    }
    model_class = loading.architecture(config)
    if adapter.config.task_type == "SEQ_CLS":
        model_class = AutoModelForSequenceClassification
        labels = _num_labels(adapter)
        if labels is not None:
            options["num_labels"] = labels
    stored_quantization = getattr(config, "quantization_config", None)
    if stored_quantization is None and adapter.quantization and not full_precision:
        options["quantization_config"] = _quantization_config(adapter.quantization)
    model, report = model_class.from_pretrained(name, output_loading_info=True, **options)
    _check_base_weights(adapter, report["missing_keys"])
    notices = []
    if getattr(model, "is_quantized", False):
        notices.append(_dequantize(model, name, stored_quantization is not None))
    _resize_embeddings(model, adapter)
    return model, notices


def _num_labels(adapter: StoredAdapter) -> int | None:
    sizes = [x[0] for name, x in adapter.shapes.items() if name.endswith(".score.weight")]
    return sizes[0] if sizes else None


def _quantization_config(settings: dict[str, Any]) -> "BitsAndBytesConfig":
    require("bitsandbytes", "an adapter that was trained on a quantized base model")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig.from_dict(settings)


def _check_base_weights(adapter: StoredAdapter, missing: set[str]) -> None:
    """Raise a ValueError if weights are missing from both the base model and the adapter."""
    in_adapter = {name.removeprefix("base_model.model.") for name in adapter.shapes}
    lacking = sorted(set(missing) - in_adapter)
    if lacking:
        raise ValueError(
            f"{adapter.base_model} has no weights for {', '.join(lacking[: loading.MOST_NAMED])}, "
            "and neither has the adapter: it belongs to another base model. Give that "
            "as --base_model."
        )


def _dequantize(model: PreTrainedModel, name: str, is_stored_quantized: bool) -> str:
    """Dequantize weights in place; return a notice."""
    bits = 8 if getattr(model, "is_loaded_in_8bit", False) else 4
    try:
        model.dequantize()
    except NotImplementedError as error:
        raise ValueError(
            f"{name} is quantized in a way that cannot be undone, so no adapter can be merged into "
            "it. Give the model in full precision as --base_model."
        ) from error
    forget_one_way_conversions(model)
    if is_stored_quantized:
        return f"The base model is stored in {bits} bits; its weights were dequantized."
    notice = (
        f"The adapter was trained on a base model in {bits} bits, so it is merged into weights "
        f"rounded in the same way; --full_precision merges it into the stored weights of {name}."
    )
    if bits == 8:
        notice += " In 8 bits, layers also round their inputs, which a merged model does not."
    return notice


def _resize_embeddings(model: PreTrainedModel, adapter: StoredAdapter) -> None:
    """Resize the embeddings to the matrix in the adapter's file, if it holds one."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    size = _stored_rows(model, embedding, adapter)
    if size is None or size == embedding.num_embeddings:
        return
    is_tied = head is not None and head.weight is embedding.weight
    if head is not None and not is_tied and _stored_rows(model, head, adapter) is None:
        raise ValueError(
            f"{adapter.folder} holds an embedding of {size:,} tokens where the base model has "
            f"{embedding.num_embeddings:,}, but not the head that grew with it. Merge in the "
            "process that trained it, with model.merge_and_unload()."
        )
    model.resize_token_embeddings(size, mean_resizing=False)


def _stored_rows(model: nn.Module, layer: nn.Module, adapter: StoredAdapter) -> int | None:
    """Return the rows of a layer's matrix in the adapter's file; None if it holds none."""
    name = next(name for name, module in model.named_modules() if module is layer)
    for end in ("weight", "base_layer.weight"):
        shape = adapter.shapes.get(f"base_model.model.{name}.{end}")
        if shape is not None:
            return shape[0]
    return None


@contextmanager
def _without_advice_on_ties() -> Iterator[None]:
    """Silence peft's warnings about tied weights, which are untied here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*tie", UserWarning)
        yield


@_without_advice_on_ties()
def _attach(model: PreTrainedModel, adapter: StoredAdapter) -> "PeftModel":
    """Load the adapter onto its base model; a ValueError if tensors are missing or unexpected."""
    device = next(model.parameters()).device
    try:
        policy: PeftModel = loading.add_adapter(model, adapter.config)
        loaded = policy.load_adapter(str(adapter.folder), "default", torch_device=str(device))
    except (RuntimeError, ValueError) as error:  # other shapes, or no such target modules
        raise _misfit(adapter, first_mismatch(error)) from error
    saved_modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    saved_modules &= set(getattr(adapter.config, "modules_to_save", None) or ())
    lost = [x for x in sorted(saved_modules) if not any(f".{x}." in key for key in adapter.shapes)]
    # If the vocabulary has grown, peft stores copies of embeddings twice, and reads one of them.
    unexpected = [name for name in loaded.unexpected_keys if ".modules_to_save." not in name]
    problems = {"missing": [*loaded.missing_keys, *lost], "unexpected": unexpected}
    for problem, names in problems.items():
        if names:
            raise _misfit(adapter, f"{problem}: {', '.join(names[: loading.MOST_NAMED])}")
    return policy


def _misfit(adapter: StoredAdapter, reason: str) -> ValueError:
    return ValueError(
        f"The adapter in {adapter.folder} does not fit the base model {adapter.base_model}: "
        f"{reason}. Give the model that it was trained on as --base_model."
    )


@_without_advice_on_ties()
@torch.no_grad()
def _merge(policy: "PeftModel") -> PreTrainedModel:
    """Merge the active adapter, layer by layer in float32, and remove it."""
    is_untied = _untie(policy.get_base_model())
    for module in policy.modules():
        if is_adapter_layer(module):
            _merge_layer(module, policy.active_peft_config.peft_type.value)
    model: PreTrainedModel = policy.unload()
    if is_untied:
        _tie_if_equal(model)
    return model


def _merge_layer(layer: "BaseTunerLayer", peft_type: str) -> None:
    base = layer.get_base_layer()
    dtypes = {weight.dtype for weight in base.parameters()}
    if dtypes & set(HALF):
        base.float()
    try:
        layer.merge(safe_merge=True)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise ValueError(f"This adapter of type {peft_type} cannot be merged: {error}") from error
    if len(dtypes) == 1:
        base.to(dtypes.pop())


def _untie(model: PreTrainedModel) -> bool:
    """Give head and embedding separate weights, as an adapter may change only one of them.

    Returns whether they were tied.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or _base_layer(head).weight is not _base_layer(embedding).weight:
        return False
    weight = _base_layer(head).weight.detach().clone()
    _base_layer(head).weight = nn.Parameter(weight, requires_grad=False)
    return True


def _base_layer(module: nn.Module) -> nn.Module:
    """Return the layer inside the wrappers of an adapter."""
    module = getattr(module, "original_module", module)
    return module.get_base_layer() if is_adapter_layer(module) else module


def _tie_if_equal(model: PreTrainedModel) -> None:
    """Tie head and embedding again if they are still equal; write the result to the config."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    are_equal = torch.equal(head.weight, embedding.weight)
    if are_equal:
        head.weight = embedding.weight
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = are_equal


def _load_tokenizer(
    adapter: StoredAdapter, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer stored with the adapter, otherwise that of the base model."""
    name = adapter.base_model
    revision = adapter.revision
    if (adapter.folder / "tokenizer_config.json").exists():
        name = str(adapter.folder)
        revision = None
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError):
        return None


def write_merged(
    merged: MergedModel, adapter: StoredAdapter, folder: Path, max_shard_size: str = "50GB"
) -> None:
    """Write a merged model as `save_pretrained` does, with its tokenizer and a record."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MERGE_RECORD).exists():
        for path in folder.glob("model*.safetensors*"):  # shards, and their index
            path.unlink()
    record = {
        "adapter": str(adapter.folder),
        "base_model": adapter.base_model,
        "dtype": str(merged.model.dtype).removeprefix("torch."),
    }
    # Written first, so that the files of an interrupted merge may be replaced.
    (folder / MERGE_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    merged.model.save_pretrained(folder, max_shard_size=max_shard_size)
    if merged.tokenizer is not None:
        merged.tokenizer.save_pretrained(folder)


def check_output(folder: Path, adapter: StoredAdapter) -> None:
    """Refuse to write into a folder that holds anything but an earlier merge."""
    for name in (str(adapter.folder), adapter.base_model):
        if folder.resolve() == Path(name).expanduser().resolve():
            raise ValueError(
                f"output_dir={str(folder)!r} is an input of the merge: choose another folder."
            )
    if not folder.exists():
        return
    if not folder.is_dir():
        raise NotADirectoryError(f"output_dir={str(folder)!r} is a file, not a folder.")
    if any(folder.iterdir()) and not (folder / MERGE_RECORD).exists():
        raise ValueError(
            f"output_dir={str(folder)!r} is not empty, and not an earlier merge that may be "
            "replaced: choose another folder."
        )
