"""Each method names classes that exist and belong together."""

from pydoc import locate

import pytest

from trl.cli.methods import METHODS


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_classes_belong_together(method):
    trainer = locate(method.trainer)
    assert trainer.config_class is locate(method.config)
    assert method.make_parser().dataclass_types[:2] == (
        locate(method.arguments),
        trainer.config_class,
    )


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_options_of_the_help_exist(method):
    parser = method.option_parser()
    names = {*method.common, *(name for names in method.needed for name in names)}
    assert [name for name in names if not parser.knows(name)] == []
