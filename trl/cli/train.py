"""What every training script does: load data, build the trainer, train, save."""

import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable
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
from ..trainer.model_config import (
    check_adapter_options,
    get_peft_config,
    get_quantization_config,
    tokenizer_source,
)
from .arguments import OnlineScriptArguments, PPOScriptArguments, ScriptArguments
from .exit import check_output_dir, one_line_errors, rank, tell_success, warn_of_missing_ranks
from .files import load_dataset_source
from .mixture import DatasetMixtureConfig, get_dataset, hold_out
from .parser import TrlParser, as_words, launch_option_names


def run_training(parser: TrlParser, trainer_class: Callable[..., Any]) -> None:
    """Train as the command line says; for what goes wrong see `one_line_errors`."""
    if not sys.stderr.isatty():  # where each state of a bar would be a line
        disable_progress_bars()
        logging.disable_progress_bar()
    with one_line_errors(parser):
        warn_of_missing_ranks()
        values, from_file, words = parser.read()
        if values.get("plan"):
            from .memory_plan import plan_of, render

            # Configurations find the other workers, so that all of them make the plan.
            plan = plan_of(parser, values, options_of_environment(os.environ))
            if rank() == 0:
                print(render(plan))
            return
        parser.check(words)
        parser.check(as_words(from_file), launch_option_names())
        trainer, script, training = _prepare(parser, values, trainer_class)
        wanted = training.resume_from_checkpoint  # a path, or a word
        wanted = {"true": True, "false": None}.get(str(wanted).lower(), wanted)
        checkpoint = trainer.find_checkpoint(wanted)
        trainer.check_settings()
    with one_line_errors(parser, trainer), trainer.run_lock:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(training.output_dir)
        tell_success(trainer)
        if training.push_to_hub:
            trainer.push_to_hub(dataset_name=script.dataset_name)
        trainer.accelerator.end_training()


def _prepare(
    parser: TrlParser, values: dict[str, Any], trainer_class: Callable[..., Any]
) -> tuple[Any, Any, Any]:
    script, training, model, mixture = parser.build(values)
    if model.model_name_or_path is None:
        raise ValueError("--model_name_or_path is required.")
    check_adapter_options(model, values)
    check_evaluation(training, mixture)
    check_model_name(model.model_name_or_path, model.model_revision)
    if rank() == 0:
        check_output_dir(training.output_dir)
    sources: dict[str, Any] = {}
    if isinstance(script, OnlineScriptArguments):
        sources["reward_funcs"] = reward_functions(script)
    if isinstance(script, PPOScriptArguments):
        sources["value_model"] = script.value_model_name_or_path
    dataset = load_data(script, mixture)
    loading = {"revision": model.model_revision, "dtype": model.dtype}
    loading["attn_implementation"] = model.attn_implementation
    training.model_init_kwargs = loading | (training.model_init_kwargs or {})
    if model.tokenizer_name_or_path is not None:
        trust = training.trust_remote_code
        sources["processing_class"] = load_tokenizer(*tokenizer_source(model), trust)
    evaluation = None
    if training.eval_strategy != "no":
        strategy = training.eval_strategy.value
        evaluation = evaluation_split(dataset, script.dataset_test_split, strategy)
    try:
        trainer = trainer_class(
            model=model.model_name_or_path,
            args=training,
            **sources,
            train_dataset=take_split(dataset, script.dataset_train_split, "--dataset_train_split"),
            eval_dataset=evaluation,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
    except SafetensorError as error:
        names = [model.model_name_or_path, getattr(script, "reward_model_name_or_path", None)]
        raise ValueError(
            f"The weights of {' or '.join(filter(None, names))} are damaged: {error}."
        ) from error
    return trainer, script, training


def reward_functions(script: OnlineScriptArguments) -> list[Any]:
    """The reward model, then the reward functions, in the order given; at least one."""
    model = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    functions = [*model, *(find_reward(name) for name in script.reward_funcs or [])]
    if not functions:
        raise ValueError(
            "Nothing rewards completions: give --reward_funcs or --reward_model_name_or_path."
        )
    return functions


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Any:
    """Load the mixture, or else the dataset named by `--dataset_name`.

    With `--test_split_size`, a share of the split to train on becomes the split to evaluate on.
    """
    if mixture.datasets:
        if script.dataset_name and rank() == 0:
            print("Both datasets and dataset_name are given; datasets is used.", file=sys.stderr)
        return get_dataset(mixture)
    if not script.dataset_name:
        raise ValueError("--dataset_name is required (or `datasets` in the configuration file).")
    name, config = script.dataset_name, script.dataset_config
    if config is not None and Path(name).expanduser().exists():
        raise ValueError(
            f"--dataset_config {config}: {name} is a local path, and only datasets of the hub have "
            "configurations. Leave it out."
        )
    dataset = load_dataset_source(name, config, script.dataset_streaming)
    if mixture.test_split_size is None:
        return dataset
    rows = take_split(dataset, script.dataset_train_split, "--dataset_train_split")
    parts = hold_out(rows, mixture.test_split_size)
    return {
        **dataset,
        script.dataset_train_split: parts["train"],
        script.dataset_test_split: parts["test"],
    }


def check_evaluation(training: Any, mixture: DatasetMixtureConfig) -> None:
    """Refuse rows that are kept for an evaluation that never comes."""
    share = mixture.test_split_size
    if share is not None and training.eval_strategy == "no":
        raise ValueError(
            f"--test_split_size {share} keeps rows for evaluation, but --eval_strategy is no: set "
            "--eval_strategy epoch or steps, or leave --test_split_size out."
        )


def evaluation_split(dataset: Any, split: str, strategy: str) -> Any:
    """Return the split to evaluate on; an error says how to get one."""
    if split not in dataset:
        raise ValueError(
            f"--eval_strategy {strategy}: there is no split {split!r} to evaluate on; the dataset "
            f"has {', '.join(dataset)}. Set --test_split_size 0.1 to keep a share of the rows to "
            "train on, or name another split with --dataset_test_split."
        )
    return dataset[split]


def take_split(dataset: Any, split: str, option: str) -> Any:
    """Return one split; an error names the splits there are."""
    if split not in dataset:
        raise ValueError(f"{option} {split}: the dataset has the splits {', '.join(dataset)}.")
    return dataset[split]


# Reward functions that can be named without their module.
KNOWN_REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(1280, 256),
}


def find_reward(name: str) -> Callable[..., Any]:
    """Find a reward function: a known name, `package.module.function`, or `file.py:function`."""
    if name in KNOWN_REWARDS:
        return KNOWN_REWARDS[name]
    place, attribute = _module_and_function(name)
    if not place:
        names = f" Known names: {', '.join(KNOWN_REWARDS)}."
        hint = did_you_mean(name, KNOWN_REWARDS, otherwise=names)
        raise ValueError(f"--reward_funcs {name}: no such reward function.{hint}")
    module = _module(place, name)
    function = getattr(module, attribute, None) if attribute else None
    if not callable(function):
        raise ValueError(f"--reward_funcs {name}: {_no_function(place, module, attribute)}")
    return function


def _module_and_function(name: str) -> tuple[str, str]:
    """Divide `package.module.function` or `file.py:function`; the function may be missing."""
    if name.endswith(".py"):
        return name, ""
    place, _, attribute = name.rpartition(":" if ".py:" in name else ".")
    return place, attribute


def _module(place: str, name: str) -> Any:
    """Load a file, or import a module; `name` is what the user wrote."""
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ValueError(f"--reward_funcs {place}: there is no such file.")
    try:
        return _loaded(place, is_file)
    except Exception as error:
        option = f"--reward_funcs {place if is_file else name}"
        raise ValueError(f"{option}: {_failure(place, error)}") from error


def _no_function(place: str, module: Any, attribute: str) -> str:
    """Say that a module, loaded from a file or by its name, lacks a function, and what it has."""
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    separator = ":" if place.endswith(".py") else "."
    own = [
        f"{place}{separator}{name}"
        for name, value in functions.items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    there = f"it defines {', '.join(own)}" if own else "it defines none"
    if not attribute:
        return f"name a function of the file; {there}."
    hint = did_you_mean(attribute, functions, f" {there.capitalize()}." if own else "")
    return f"{module.__name__} has no function {attribute!r}.{hint}"


def _loaded(place: str, is_file: bool) -> Any:
    if not is_file:
        if sys.path[0] != os.getcwd():
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    # The name under which the file can be imported, so that workers can pickle its functions.
    name = Path(place).stem
    module = types.ModuleType(name)
    module.__file__ = place
    sys.modules.setdefault(name, module)
    exec(compile(Path(place).read_text(encoding="utf-8"), place, "exec"), vars(module))
    return module


def _failure(module: str, error: Exception) -> str:
    """Why a module cannot be loaded: it is absent, or something failed, and where."""
    absent = error.name if isinstance(error, ModuleNotFoundError) else None
    if absent is not None and f"{module}.".startswith(f"{absent}."):
        return f"there is no module {absent!r} in {os.getcwd()} or among the installed packages."
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"loading it failed: {type(error).__name__}: {error}{place}."
