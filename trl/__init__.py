"""Supervised and reinforcement-learning post-training for transformer language models.

Names are imported when they are first used, so that `import trl` is quick.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "cli.parser": ("TrlParser",),
    "data.formats": (
        "apply_chat_template",
        "is_conversational",
        "is_conversational_from_value",
        "maybe_apply_chat_template",
        "maybe_convert_to_chatml",
        "prepare_multimodal_messages",
    ),
    "data.mixture": ("DatasetMixtureConfig", "get_dataset"),
    "data.packing": ("pack_dataset", "truncate_dataset"),
    "data.preference": (
        "extract_prompt",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "unpair_preference_dataset",
    ),
    "data.templates": ("clone_chat_template", "get_training_chat_template"),
    "data.tool_template": ("add_response_schema", "supports_tool_calling"),
    "memory.callback": ("MemoryCallback",),
    "models.reference": ("create_reference_model",),
    "cli.arguments": ("ScriptArguments",),
    "scripts.utils": ("init_zero_verbose",),
    "trainer.bema": ("BEMACallback",),
    "trainer.callbacks": ("RichProgressCallback", "SyncRefModelCallback"),
    "trainer.model_config": ("ModelConfig", "get_peft_config", "get_quantization_config"),
    "trainer.samples": ("LogCompletionsCallback", "WeaveCallback"),
}
_METHODS = {"dpo": "DPO", "grpo": "GRPO", "kto": "KTO", "online_dpo": "OnlineDPO", "ppo": "PPO"}
_METHODS |= {"reward": "Reward", "rloo": "RLOO", "sft": "SFT"}
for _module, _title in _METHODS.items():
    _MODULES[f"trainer.{_module}_config"] = (f"{_title}Config",)
    _MODULES[f"trainer.{_module}_trainer"] = (f"{_title}Trainer",)
_SUBMODULES = ("chat_template_utils", "data_utils", "models", "rewards", "scripts", "trainer")
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .imports import version_of

        return version_of("trl")
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        from .absent import refuse

        refuse(name, _HOME)
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_SUBMODULES, "__version__"])
