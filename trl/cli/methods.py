"""The methods of training: what each command trains with, and its options, by name.

Nothing heavy is imported: classes are named by their paths, and loaded when they are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pydoc import locate
from typing import Any

from .options import class_from_source
from .parser import TrlParser

MODEL = "trl.trainer.model_config.ModelConfig"
MIXTURE = "trl.cli.mixture.DatasetMixtureConfig"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of training, and the command line that it has."""

    name: str  # of its command
    summary: str  # what it does, for `trl --help`
    config: str  # the paths of its classes
    trainer: str
    arguments: str
    needed: tuple[tuple[str, ...], ...]  # options that must be given; of several, one must be
    common: tuple[str, ...]  # further options that `--help` lists
    example: str  # options of a run, for `--help`

    def make_parser(self, load: Callable[[str], Any] = locate, **options: Any) -> TrlParser:
        """A parser that builds the dataclasses; imports them, unless they are loaded otherwise."""
        paths = (self.arguments, self.config, MODEL, MIXTURE)
        return TrlParser(tuple(map(load, paths)), prog=f"trl {self.name}", **options)

    def option_parser(self, **options: Any) -> TrlParser:
        """A parser of the same options, which imports nothing heavy and builds nothing."""
        return self.make_parser(class_from_source, **options)


def _method(
    title: str, summary: str, arguments: str, common: tuple[str, ...], example: str
) -> Method:
    name = title.lower().replace(" ", "-")
    kind = title.replace(" ", "")
    module = f"trl.trainer.{name.replace('-', '_')}"
    needed: tuple[tuple[str, ...], ...] = (("model_name_or_path",), ("dataset_name", "datasets"))
    if arguments:
        needed += (("reward_funcs", "reward_model_name_or_path"),)
    batches = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return Method(
        name=name,
        summary=summary,
        config=f"{module}_config.{kind}Config",
        trainer=f"{module}_trainer.{kind}Trainer",
        arguments=f"trl.cli.arguments.{arguments}ScriptArguments",
        needed=needed,
        common=("output_dir", *common, *batches, "use_peft", "report_to", "plan", "config"),
        example=f"--model_name_or_path {example} --output_dir output",
    )


def _online(title: str, common: tuple[str, ...], arguments: str = "Online") -> Method:
    data = "Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K \\\n   "
    common += ("learning_rate", "max_steps", "temperature", "max_completion_length", "use_vllm")
    example = f"{data} --reward_funcs accuracy_reward"
    return _method(title, f"train with {title}", arguments, common, example)


def _offline(title: str, summary: str, common: tuple[str, ...], example: str) -> Method:
    common = ("max_length", *common, "learning_rate", "num_train_epochs", "max_steps")
    common += ("eval_strategy", "test_split_size")
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
            "train on answers that are desirable or not",
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
