"""The data utilities under the module name that scripts import."""

from .data.chatml import maybe_convert_to_chatml
from .data.formats import (
    apply_chat_template,
    is_conversational,
    is_conversational_from_value,
    maybe_apply_chat_template,
    prepare_multimodal_messages,
)
from .data.mixture import DatasetMixtureConfig, get_dataset
from .data.preference import (
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)

__all__ = [
    "DatasetMixtureConfig",
    "apply_chat_template",
    "extract_prompt",
    "get_dataset",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "prepare_multimodal_messages",
    "unpair_preference_dataset",
]
