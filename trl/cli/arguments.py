"""Options of the training commands about the dataset, rewards and the value model."""

from dataclasses import dataclass

from ..options import option


@dataclass
class ScriptArguments:
    """Dataset to train on, and assumptions of the memory plan."""

    dataset_name: str | None = option(
        None,
        "Hub id, or a local json, jsonl, csv or parquet file, a folder of them, or a "
        "dataset saved to disk.",
    )
    dataset_config: str | None = option(None, "Configuration of the dataset.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Read the dataset as a stream.")
    ignore_bias_buffers: bool = option(False, "Leave boolean buffers out of DDP broadcasts.")
    plan: bool = option(
        False, "Print how much memory the run would take, and stop before anything is loaded."
    )
    device_memory_gb: float | None = option(
        None, "For the memory plan: memory of one device. None: that of this machine."
    )
    longest_prompt: int | None = option(
        None,
        "For the memory plan: tokens of the longest prompt. None: 512 are assumed, or as many as "
        "the lengths of rows leave room for.",
        ge=1,
    )


@dataclass
class OnlineScriptArguments(ScriptArguments):
    """Rewards of completions."""

    reward_model_name_or_path: str | None = option(
        None, "Sequence classifier whose score is the reward."
    )
    reward_funcs: list[str] | None = option(
        None,
        "Reward functions: names from trl.rewards, dotted paths (package.module.function), or "
        "path/to/file.py:function.",
    )


@dataclass
class PPOScriptArguments(OnlineScriptArguments):
    """Value model of PPO."""

    value_model_name_or_path: str | None = option(
        None,
        "Sequence classifier with one label that gives values, and is trained. None: a layer on "
        "the policy.",
    )
