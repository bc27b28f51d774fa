"""How long the rows are that a trainer would make of a dataset."""

from collections.abc import Sequence
from typing import Any

from ..data.encode import TextEncoder
from ..data.lengths import LengthProfile, profile_preferences, profile_prompts, profile_supervised
from ..data.preference_rows import prepare_preferences
from ..data.prepare import prepare_supervised
from ..data.supervised import SupervisedOptions
from ..models.loading import load_tokenizer
from ..online.prompts import PromptEncoder
from .offline.offline_config import OfflineConfig, set_template
from .sft_config import SFTConfig


def profile_rows(
    dataset: Any, model: str, args: Any, limits: Sequence[int] = (), revision: str | None = None
) -> LengthProfile:
    """Profile a dataset as the trainer of `args` would prepare it; `limits` are judged as well."""
    tokenizer = load_tokenizer(model, revision, args.trust_remote_code)
    if not isinstance(args, OfflineConfig):
        encode = PromptEncoder(tokenizer, args.chat_template_kwargs)
        return profile_prompts(encode(list(dataset)).token_ids, args.num_generations, limits)
    set_template(None, tokenizer, args)
    encoder, processes = TextEncoder(tokenizer), args.dataset_num_proc
    if not isinstance(args, SFTConfig):
        table = prepare_preferences(dataset, encoder, num_proc=processes)
        return profile_preferences(table, limits)
    table = prepare_supervised(dataset, encoder, SupervisedOptions.of(args), processes)
    return profile_supervised(table, limits, args.max_length if args.packing else None)
