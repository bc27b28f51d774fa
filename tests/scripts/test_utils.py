import logging
import warnings

import trl
from trl import scripts
from trl.cli.mixture import DatasetConfig, get_dataset
from trl.cli.parser import TrlParser
from trl.data.templates import clone_chat_template
from trl.scripts import utils


def test_names_are_those_of_the_package():
    assert utils.TrlParser is scripts.TrlParser is trl.TrlParser is TrlParser
    assert utils.get_dataset is scripts.get_dataset is get_dataset
    assert utils.DatasetConfig is DatasetConfig
    assert trl.chat_template_utils.clone_chat_template is clone_chat_template


def test_only_errors_are_shown(capsys):
    logger = logging.getLogger()
    level, handlers = logger.level, logger.handlers[:]
    try:
        trl.init_zero_verbose()
        logging.warning("quiet words")
        warnings.warn("quiet too", stacklevel=1)
        logging.error("loud words")
    finally:
        logging.captureWarnings(False)
        logger.setLevel(level)
        logger.handlers[:] = handlers
    shown = "".join(capsys.readouterr())
    assert "loud words" in shown and "quiet" not in shown
