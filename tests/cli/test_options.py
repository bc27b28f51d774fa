"""What sources say of options is what the classes say."""

import enum
import typing

import pytest
from transformers.training_args import OptimizerNames

from trl.cli.commands import TRAINING
from trl.cli.options import Computed, class_from_source, options_of
from trl.trainer.rloo_config import RLOOConfig


def members(annotation):
    """The parts of a type, enumerations as their values."""
    found = typing.get_args(annotation) or (annotation,)
    if found != (annotation,):
        return [members(x) for x in found]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return sorted(str(x.value) for x in annotation)
    return annotation


@pytest.mark.parametrize("command", TRAINING.values(), ids=TRAINING)
def test_sources_agree_with_classes(command):
    """A new release of transformers may write its options in another way."""
    parsers = command.make_parser(), command.option_parser()
    for real, read in zip(*(parser.dataclass_types for parser in parsers), strict=True):
        assert (real.__name__, real.__module__) == (read.__name__, read.__module__)
        assert getattr(real, "legacy_options", {}) == getattr(read, "legacy_options", {})
        assert [x.name for x in options_of(real)] == [x.name for x in options_of(read)]
        for one, other in zip(options_of(real), options_of(read), strict=True):
            assert (one.help, one.owner) == (other.help, other.owner)
            assert one.is_foreign is other.is_foreign
            if other.default is not Computed:
                assert one.default == other.default
            if not one.is_foreign:
                assert (one.choices, one.annotation) == (other.choices, other.annotation)
            elif one.name != "parallelism_config":  # a class that no word stands for
                assert members(one.annotation) == members(other.annotation), one.name


def test_the_values_of_an_enumeration_are_known():
    parser = TRAINING["rloo"].option_parser()
    name = next(iter(OptimizerNames)).value
    assert parser.read(["--optim", name])[0]["optim"] == name
    (problem,) = parser.collect(["--optim", "adamm"])[1]
    assert problem.startswith("--optim: 'adamm' ") and name in problem


def test_an_option_is_described():
    path = "trl.trainer.rloo_config.RLOOConfig"
    for kind in (RLOOConfig, class_from_source(path)):
        beta = options_of(kind)[0]
        assert (beta.name, beta.annotation, beta.default) == ("beta", float, 0.05)
        assert (beta.owner, beta.is_foreign) == ("RLOOConfig", False)
