"""What every training command does in its workers: load data, build the trainer, train, save."""

import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from safetensors import SafetensorError
from transformers.utils import logging

from .. import rewards
from ..memory.settings import options_of_environment
from ..models.loading import load_tokenizer
from ..sources import check_model_name
from ..suggestions import did_you_mean
from ..trainer.base.base_config import BaseConfig
from ..trainer.model_config import (
    check_adapter_options,
    get_peft_config,
    get_quantization_config,
    tokenizer_source,
)
from .arguments import OnlineScriptArguments, PPOScriptArguments, ScriptArguments
from .argv import launch_option_names, to_argv
from .exit import check_output_dir, one_line_errors, print_success, rank, warn_of_missing_ranks
from .files import AnyDataset, Splits, load_dataset_source
from .mixture import DatasetMixtureConfig, get_dataset, hold_out
from .parser import ParsedOptions, TrlParser

RewardFunction = Callable[..., Any]


def run_training(parser: TrlParser, trainer_class: Callable[..., Any]) -> None:
    """Train as the command line says; errors are reported by `one_line_errors`.

    Args:
        trainer_class: a trainer, called with keyword arguments.
    """
    if not sys.stderr.isatty():  # in a file, each update of a progress bar would be a line
        disable_progress_bars()
        logging.disable_progress_bar()
    with one_line_errors(parser):
        warn_of_missing_ranks()
        parsed = parser.read()
        if parsed.values.get("plan"):
            _print_memory_plan(parser, parsed.values)
            return
        parser.check_unknown(parsed.unknown_argv)
        parser.check_unknown(to_argv(parsed.unknown_config), launch_option_names())
        run = _prepare_run(parser, parsed, trainer_class)
        trainer = run.trainer
        checkpoint = trainer.find_checkpoint(_checkpoint_choice(run.training))
        trainer.check_settings()
    with one_line_errors(parser, trainer), trainer.run_lock:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(run.training.output_dir)
        print_success(trainer)
        if run.training.push_to_hub:
            trainer.push_to_hub(dataset_name=run.script.dataset_name)
        trainer.accelerator.end_training()


def _print_memory_plan(parser: TrlParser, values: dict[str, Any]) -> None:
    from .memory_plan import plan_of, render

    # Building the configurations connects the workers, so every rank has to make the plan.
    plan = plan_of(parser, values, options_of_environment(os.environ))
    if rank() == 0:
        print(render(plan))


def _checkpoint_choice(training: BaseConfig) -> str | bool | None:
    """Return the path of a checkpoint, True for the newest one, or None."""
    choice = training.resume_from_checkpoint  # on the command line, true and false are text
    word = str(choice).lower()
    if word == "true":
        return True
    return None if word == "false" else choice


@dataclass
class PreparedRun:
    """A trainer that is ready to train, and the options it was built from."""

    trainer: Any
    script: ScriptArguments
    training: BaseConfig


def _prepare_run(
    parser: TrlParser, parsed: ParsedOptions, trainer_class: Callable[..., Any]
) -> PreparedRun:
    """Check the options, load the dataset and the reward functions, and build the trainer."""
    script, training, model, mixture = parser.build(parsed.values)
    if model.model_name_or_path is None:
        raise ValueError("--model_name_or_path is required.")
    check_adapter_options(model, parsed.values)
    check_evaluation(training, mixture)
    check_model_name(model.model_name_or_path, model.model_revision)
    if rank() == 0:
        check_output_dir(training.output_dir)
    arguments: dict[str, Any] = {}
    if isinstance(script, OnlineScriptArguments):
        arguments["reward_funcs"] = reward_functions(script)
    if isinstance(script, PPOScriptArguments):
        arguments["value_model"] = script.value_model_name_or_path
    dataset = load_data(script, mixture)
    model_options = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    training.model_init_kwargs = model_options | (training.model_init_kwargs or {})
    if model.tokenizer_name_or_path is not None:
        tokenizer = load_tokenizer(*tokenizer_source(model), training.trust_remote_code)
        arguments["processing_class"] = tokenizer
    eval_dataset = None
    if training.eval_strategy != "no":
        strategy = training.eval_strategy.value
        eval_dataset = evaluation_split(dataset, script.dataset_test_split, strategy)
    try:
        trainer = trainer_class(
            model=model.model_name_or_path,
            args=training,
            **arguments,
            train_dataset=take_split(dataset, script.dataset_train_split, "--dataset_train_split"),
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
    except SafetensorError as error:
        names = [model.model_name_or_path, getattr(script, "reward_model_name_or_path", None)]
        raise ValueError(
            f"The weights of {' or '.join(filter(None, names))} are damaged: {error}."
        ) from error
    return PreparedRun(trainer, script, training)


def reward_functions(script: OnlineScriptArguments) -> list[str | RewardFunction]:
    """Return the name of the reward model, if any, then the reward functions; at least one."""
    rewards: list[str | RewardFunction] = []
    if script.reward_model_name_or_path:
        rewards.append(script.reward_model_name_or_path)
    rewards += [find_reward(name) for name in script.reward_funcs or []]
    if not rewards:
        raise ValueError(
            "Nothing rewards completions: give --reward_funcs or --reward_model_name_or_path."
        )
    return rewards


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """Load the mixture, or else the dataset named by `--dataset_name`, as splits by name.

    With `--test_split_size`, rows of the training split are held out as the evaluation split.
    """
    if mixture.datasets:
        if script.dataset_name and rank() == 0:
            print("Both datasets and dataset_name are given; datasets is used.", file=sys.stderr)
        return get_dataset(mixture)
    if not script.dataset_name:
        raise ValueError("--dataset_name is required (or `datasets` in the configuration file).")
    is_local = Path(script.dataset_name).expanduser().exists()
    if script.dataset_config is not None and is_local:
        raise ValueError(
            f"--dataset_config {script.dataset_config}: {script.dataset_name} is a local path, and "
            "only datasets of the hub have configurations. Leave it out."
        )
    splits = load_dataset_source(
        script.dataset_name, script.dataset_config, script.dataset_streaming
    )
    if mixture.test_split_size is None:
        return splits
    rows = take_split(splits, script.dataset_train_split, "--dataset_train_split")
    held_out = hold_out(rows, mixture.test_split_size)
    return {
        **splits,
        script.dataset_train_split: held_out["train"],
        script.dataset_test_split: held_out["test"],
    }


def check_evaluation(training: BaseConfig, mixture: DatasetMixtureConfig) -> None:
    """Raise a ValueError if rows are held out for evaluation, but there is no evaluation."""
    share = mixture.test_split_size
    if share is not None and training.eval_strategy == "no":
        raise ValueError(
            f"--test_split_size {share} keeps rows for evaluation, but --eval_strategy is no: set "
            "--eval_strategy epoch or steps, or leave --test_split_size out."
        )
    if training.eval_on_start and training.eval_strategy == "no":
        raise ValueError(
            "--eval_on_start true has nothing to evaluate on, because --eval_strategy is no: set "
            "--eval_strategy epoch or steps, or leave --eval_on_start out."
        )


def evaluation_split(splits: Splits, name: str, strategy: str) -> AnyDataset:
    """Return the split to evaluate on; if it is missing, the error says how to get one."""
    if name not in splits:
        raise ValueError(
            f"--eval_strategy {strategy}: there is no split {name!r} to evaluate on; the dataset "
            f"has {', '.join(splits)}. Set --test_split_size 0.1 to keep a share of the rows to "
            "train on, or name another split with --dataset_test_split."
        )
    return splits[name]


def take_split(splits: Splits, name: str, option: str) -> AnyDataset:
    """Return one split; if it is missing, the error names the others."""
    if name not in splits:
        raise ValueError(f"{option} {name}: the dataset has the splits {', '.join(splits)}.")
    return splits[name]


# Reward functions that can be named without their module.
KNOWN_REWARDS: dict[str, RewardFunction] = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(1280, 256),
}


def find_reward(name: str) -> RewardFunction:
    """Return a reward function: a known one, `package.module.function` or `file.py:function`."""
    if name in KNOWN_REWARDS:
        return KNOWN_REWARDS[name]
    module_source, function_name = _module_and_function(name)
    if not module_source:
        known_names = f" Known names: {', '.join(KNOWN_REWARDS)}."
        hint = did_you_mean(name, KNOWN_REWARDS, otherwise=known_names)
        raise ValueError(f"--reward_funcs {name}: no such reward function.{hint}")
    module = _load_reward_module(module_source, name)
    function = getattr(module, function_name, None) if function_name else None
    if not callable(function):
        error_text = _missing_function_error(module_source, module, function_name)
        raise ValueError(f"--reward_funcs {name}: {error_text}")
    return function


def _module_and_function(name: str) -> tuple[str, str]:
    """Split `package.module.function` or `file.py:function`; the function may be missing."""
    if name.endswith(".py"):
        return name, ""
    separator = ":" if ".py:" in name else "."
    module_source, _, function_name = name.rpartition(separator)
    return module_source, function_name


def _load_reward_module(module_source: str, name: str) -> types.ModuleType:
    """Load a file or import a module.

    Args:
        name: what the user gave as the reward function, for errors.
    """
    is_file = module_source.endswith(".py")
    if is_file and not Path(module_source).is_file():
        raise ValueError(f"--reward_funcs {module_source}: there is no such file.")
    try:
        return _load_file(module_source) if is_file else _import_from_cwd(module_source)
    except Exception as error:
        subject = module_source if is_file else name
        error_text = _loading_error(module_source, error)
        raise ValueError(f"--reward_funcs {subject}: {error_text}") from error


def _missing_function_error(
    module_source: str, module: types.ModuleType, function_name: str
) -> str:
    """Return the error for a module that lacks a function, with the functions that it defines."""
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    separator = ":" if module_source.endswith(".py") else "."
    own_functions = [
        f"{module_source}{separator}{name}"
        for name, value in functions.items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    definitions = f"it defines {', '.join(own_functions) or 'none'}"
    if not function_name:
        return f"name a function of the file; {definitions}."
    otherwise = f" {definitions.capitalize()}." if own_functions else ""
    hint = did_you_mean(function_name, functions, otherwise)
    return f"{module.__name__} has no function {function_name!r}.{hint}"


def _import_from_cwd(name: str) -> types.ModuleType:
    """Import a module, which may be in the current folder."""
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _load_file(path: str) -> types.ModuleType:
    """Run a Python file as a module."""
    # Under this name the file can be imported, so workers can pickle its functions.
    name = Path(path).stem
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules.setdefault(name, module)
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), vars(module))
    return module


def _loading_error(module_source: str, error: Exception) -> str:
    """Return why a module cannot be loaded: it is missing, or something failed in it, and where."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_source}.".startswith(f"{missing}."):
        return f"there is no module {missing!r} in {os.getcwd()} or among the installed packages."
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_syntax_error = isinstance(error, SyntaxError)  # its message has the line
    location = "" if is_syntax_error else f" ({last.filename}, line {last.lineno})"
    return f"loading it failed: {type(error).__name__}: {error}{location}."
