"""What programs need from the command line, under the module name that scripts import."""

import logging

from ..cli import arguments, mixture, parser
from ..imports import require

TrlParser = parser.TrlParser
ScriptArguments = arguments.ScriptArguments
DatasetConfig = mixture.DatasetConfig
DatasetMixtureConfig = mixture.DatasetMixtureConfig
get_dataset = mixture.get_dataset


def init_zero_verbose() -> None:
    """Show errors alone, through rich; warnings become lines of the log."""
    handler = require("rich.logging", "init_zero_verbose").RichHandler()
    logging.basicConfig(format="%(message)s", datefmt="[%X]", handlers=[handler], force=True)
    logging.getLogger().setLevel(logging.ERROR)
    logging.captureWarnings(True)
