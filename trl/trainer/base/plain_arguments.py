"""Plain `transformers.TrainingArguments` as the configuration of a trainer."""

import dataclasses
from typing import Any

from transformers import TrainingArguments

from .base_config import BaseConfig


def config_of(args: TrainingArguments, config_class: type[BaseConfig]) -> BaseConfig:
    """Make a configuration with the values set in `args`, and its own defaults for the rest.

    A value that equals the default of transformers counts as not set: nothing tells it from one
    that the user wrote. An option of a subclass that the configuration lacks is a TypeError.
    """
    defaults = TrainingArguments(args.output_dir)
    values = {"output_dir": args.output_dir}
    for field in dataclasses.fields(args):
        if field.init:
            value = vars(args)[field.name]
            if value != vars(defaults).get(field.name, field.default):
                values[field.name] = value
    # Evaluations as frequent as logs are what transformers does where eval_steps is not set.
    if "logging_steps" not in values and values.get("eval_steps") == args.logging_steps:
        del values["eval_steps"]
    options: dict[str, Any] = values
    return config_class(**options)
