"""The training methods: for each command, its trainer and options, named by their paths.

Nothing heavy is imported: classes are named by their paths, and loaded when they are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pydoc import locate
from typing import Any

from .options import class_from_source
from .parser import TrlParser

MODEL_CONFIG = "trl.trainer.model_config.ModelConfig"
MIXTURE_CONFIG = "trl.cli.mixture.DatasetMixtureConfig"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training method and its command line. Classes are given by their paths."""

    name: str  # of the command
    summary: str  # what the command does, for `trl --help`
    config: str
    trainer: str
    arguments: str  # the dataclass of options about data and rewards
    needed: tuple[tuple[str, ...], ...]  # required options; of each tuple, one must be given
    common: tuple[str, ...]  # further options that `--help` lists
    example: str  # options of an example run, for `--help`

    def make_parser(
        self, load_class: Callable[[str], Any] = locate, **parser_options: Any
    ) -> TrlParser:
        """Make a parser that builds the dataclasses.

        Args:
            load_class: returns the class at a path; by default it is imported.
        """
        paths = (self.arguments, self.config, MODEL_CONFIG, MIXTURE_CONFIG)
        dataclass_types = tuple(load_class(path) for path in paths)
        return TrlParser(dataclass_types, prog=f"trl {self.name}", **parser_options)

    def option_parser(self, **parser_options: Any) -> TrlParser:
        """Make a parser of the same options that imports nothing heavy and builds nothing."""
        return self.make_parser(class_from_source, **parser_options)


def _method(
    title: str, summary: str, arguments_prefix: str, common: tuple[str, ...], example: str
) -> Method:
    """Describe a method; its class names and modules follow from its title, such as "Online DPO".

    Args:
        arguments_prefix: what precedes "ScriptArguments" in the name of the class of its arguments;
            empty for a method without rewards.
    """
    name = title.lower().replace(" ", "-")
    class_prefix = title.replace(" ", "")
    module = f"trl.trainer.{name.replace('-', '_')}"
    needed: tuple[tuple[str, ...], ...] = (("model_name_or_path",), ("dataset_name", "datasets"))
    if arguments_prefix:
        needed += (("reward_funcs", "reward_model_name_or_path"),)
    return Method(
        name=name,
        summary=summary,
        config=f"{module}_config.{class_prefix}Config",
        trainer=f"{module}_trainer.{class_prefix}Trainer",
        arguments=f"trl.cli.arguments.{arguments_prefix}ScriptArguments",
        needed=needed,
        common=(
            "output_dir",
            *common,
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "use_peft",
            "report_to",
            "plan",
            "config",
        ),
        example=f"--model_name_or_path {example} --output_dir output",
    )


def _online(title: str, common: tuple[str, ...], arguments_prefix: str = "Online") -> Method:
    """Describe a method that generates completions and rewards them."""
    common = (
        *common,
        "learning_rate",
        "max_steps",
        "temperature",
        "max_completion_length",
        "use_vllm",
    )
    example = (
        "Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K \\\n    "
        "--reward_funcs accuracy_reward"
    )
    return _method(title, f"train with {title}", arguments_prefix, common, example)


def _offline(title: str, summary: str, common: tuple[str, ...], example: str) -> Method:
    """Describe a method that trains on the rows of a dataset."""
    common = (
        "max_length",
        *common,
        "learning_rate",
        "num_train_epochs",
        "max_steps",
        "eval_strategy",
        "test_split_size",
    )
    return _method(title, summary, "", common, example)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _offline(
            "SFT",
            "train on texts, conversations or completions",
            ("packing", "assistant_only_loss"),
            "Qwen/Qwen3-0.6B-Base --dataset_name trl-lib/Capybara \\\n    --packing",
        ),
        _offline(
            "DPO",
            "train on pairs of a chosen and a rejected answer",
            ("beta", "loss_type", "max_prompt_length", "precompute_ref_log_probs"),
            "Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized \\\n   ",
        ),
        _offline(
            "KTO",
            "train on answers labeled as desirable or undesirable",
            ("beta", "loss_type"),
            "Qwen/Qwen3-0.6B --dataset_name trl-lib/kto-mix-14k \\\n   ",
        ),
        _offline(
            "Reward",
            "train a model that scores answers, on preferences",
            ("center_rewards_coefficient",),
            "Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized \\\n   ",
        ),
        _online("RLOO", ("num_generations", "beta")),
        _online("GRPO", ("num_generations", "beta", "loss_type", "scale_rewards")),
        _online("Online DPO", ("beta", "loss_type", "missing_eos_penalty")),
        _online(
            "PPO", ("beta", "num_ppo_epochs", "gamma", "lam", "value_model_name_or_path"), "PPO"
        ),
    )
}
