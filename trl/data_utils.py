"""The data utilities under the module name that scripts import."""

from .data import chatml, formats, mixture, packing, preference

DatasetMixtureConfig = mixture.DatasetMixtureConfig
get_dataset = mixture.get_dataset
maybe_convert_to_chatml = chatml.maybe_convert_to_chatml
apply_chat_template = formats.apply_chat_template
is_conversational = formats.is_conversational
is_conversational_from_value = formats.is_conversational_from_value
maybe_apply_chat_template = formats.maybe_apply_chat_template
prepare_multimodal_messages = formats.prepare_multimodal_messages
extract_prompt = preference.extract_prompt
maybe_extract_prompt = preference.maybe_extract_prompt
unpair_preference_dataset = preference.unpair_preference_dataset
maybe_unpair_preference_dataset = preference.maybe_unpair_preference_dataset
common_prefix_length = preference.common_prefix_length
pack_dataset = packing.pack_dataset
truncate_dataset = packing.truncate_dataset
