"""What sources say of options is what the classes say."""

import enum
import typing

import pytest
from transformers.training_args import OptimizerNames

from trl.cli.commands import TRAINING
from trl.cli.options import options_of_class, options_of_source
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
    pairs = zip(command.make_parser().classes, command.option_parser().classes, strict=True)
    for real, read in pairs:
        assert (real.name, real.package, real.legacy) == (read.name, read.package, read.legacy)
        assert [x.name for x in real.options] == [x.name for x in read.options]
        for one, other in zip(real.options, read.options, strict=True):
            assert (one.help, one.owner, one.package) == (other.help, other.owner, other.package)
            if other.default != "computed":
                assert one.default == other.default
            if one.package == "trl":
                assert (one.choices, one.annotation) == (other.choices, other.annotation)
            elif one.name != "parallelism_config":  # a class that no word stands for
                assert members(one.annotation) == members(other.annotation), one.name


def test_the_values_of_an_enumeration_are_known():
    parser = TRAINING["rloo"].option_parser()
    name = next(iter(OptimizerNames)).value
    assert parser.convert({"optim": name})[0]["optim"] == name
    (problem,) = parser.convert({"optim": "adamm"})[1]
    assert problem.startswith("--optim: 'adamm' ") and name in problem


def test_an_option_is_described():
    path = "trl.trainer.rloo_config.RLOOConfig"
    for kind in (options_of_class(RLOOConfig), options_of_source(path)):
        beta = kind.options[0]
        assert (beta.name, beta.annotation, beta.default) == ("beta", float, 0.05)
        assert (beta.owner, beta.package) == ("RLOOConfig", "trl")
