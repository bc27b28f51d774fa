"""Utilities of training scripts, under the module name that users' scripts import."""

import logging

from ..cli import arguments, mixture, parser
from ..imports import require

TrlParser = parser.TrlParser
ScriptArguments = arguments.ScriptArguments
DatasetConfig = mixture.DatasetConfig
DatasetMixtureConfig = mixture.DatasetMixtureConfig
get_dataset = mixture.get_dataset


def init_zero_verbose() -> None:
    """Log only errors, through rich. Warnings go through logging, so they are not shown."""
    handler = require("rich.logging", "init_zero_verbose").RichHandler()
    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[handler], force=True)
    logging.getLogger().setLevel(logging.ERROR)
    logging.captureWarnings(True)
