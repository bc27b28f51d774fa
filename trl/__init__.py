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
    "data.templates": ("add_response_schema", "clone_chat_template", "get_training_chat_template"),
    "data.tool_template": ("supports_tool_calling",),
    "memory.callback": ("MemoryCallback",),
    "models.reference": ("create_reference_model",),
    "cli.arguments": ("ScriptArguments",),
    "scripts.utils": ("init_zero_verbose",),
    "trainer.bema": ("BEMACallback",),
    "trainer.callbacks": ("RichProgressCallback", "SyncRefModelCallback"),
    "trainer.dpo_config": ("DPOConfig",),
    "trainer.dpo_trainer": ("DPOTrainer",),
    "trainer.grpo_config": ("GRPOConfig",),
    "trainer.grpo_trainer": ("GRPOTrainer",),
    "trainer.kto_config": ("KTOConfig",),
    "trainer.kto_trainer": ("KTOTrainer",),
    "trainer.model_config": ("ModelConfig", "get_peft_config", "get_quantization_config"),
    "trainer.ppo_config": ("PPOConfig",),
    "trainer.ppo_trainer": ("PPOTrainer",),
    "trainer.reward_config": ("RewardConfig",),
    "trainer.reward_trainer": ("RewardTrainer",),
    "trainer.online_dpo_config": ("OnlineDPOConfig",),
    "trainer.online_dpo_trainer": ("OnlineDPOTrainer",),
    "trainer.rloo_config": ("RLOOConfig",),
    "trainer.rloo_trainer": ("RLOOTrainer",),
    "trainer.samples": ("LogCompletionsCallback", "WeaveCallback"),
    "trainer.sft_config": ("SFTConfig",),
    "trainer.sft_trainer": ("SFTTrainer",),
}
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
