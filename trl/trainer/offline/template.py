"""The chat template and the special tokens that options choose."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...data.templates import clone_chat_template, take_template
from .offline_config import OfflineConfig


def set_template(
    model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, args: OfflineConfig
) -> None:
    """Give model and tokenizer what `chat_template_path`, `eos_token` and `pad_token` ask for.

    Args:
        model (*optional*): None: only the tokenizer is used.

    Raises:
        ValueError: for a token that the tokenizer does not know.
    """
    if args.chat_template_path is not None:
        _read_template(model, tokenizer, args.chat_template_path)
    for name, token in (("eos_token", args.eos_token), ("pad_token", args.pad_token)):
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ValueError(
                f"{name}={token!r} is not in the tokenizer's vocabulary. Its own is "
                f"{getattr(tokenizer, name)!r}."
            )
        setattr(tokenizer, name, token)
    if args.eos_token is not None and model is not None:
        _end_with(model, tokenizer.eos_token_id)


def _read_template(model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    if Path(path).suffix in (".jinja", ".j2"):
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif model is None:
        take_template(tokenizer, path)
    else:
        clone_chat_template(model, tokenizer, path)


def _end_with(model: nn.Module, eos: int) -> None:
    """Let the model end what it generates with a token; the others that ended it still do."""
    model.config.get_text_config().eos_token_id = eos
    if (generation := getattr(model, "generation_config", None)) is not None:
        known = generation.eos_token_id
        others = known if isinstance(known, list) else [known]
        generation.eos_token_id = [eos, *(i for i in others if i not in (None, eos))]
