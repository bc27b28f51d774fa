"""What sources say of options is what the classes say."""

import argparse
import dataclasses
import enum
import typing
from dataclasses import dataclass

import pytest
from transformers.training_args import OptimizerNames

from trl.cli.commands import TRAINING
from trl.cli.options import (
    UnknownValue,
    class_from_source,
    option_actions,
    option_groups,
    options_of,
    short_help,
)
from trl.cli.parser import TrlParser
from trl.scripts import rloo
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
            assert (one.help, one.owner.__name__) == (other.help, other.owner.__name__)
            assert one.is_foreign is other.is_foreign
            if other.default is not UnknownValue:
                assert one.default == other.default
            if not one.is_foreign:
                assert (one.choices, one.annotation) == (other.choices, other.annotation)
            elif one.name != "parallelism_config":  # a class that no word stands for
                assert members(one.annotation) == members(other.annotation), one.name


def test_the_values_of_an_enumeration_are_known():
    parser = TRAINING["rloo"].option_parser()
    name = next(iter(OptimizerNames)).value
    assert parser.read(["--optim", name]).values["optim"] == name
    (problem,) = parser.read_with_errors(["--optim", "adamm"]).errors
    assert problem.startswith("--optim: 'adamm' ") and name in problem


def test_an_option_is_described():
    path = "trl.trainer.rloo_config.RLOOConfig"
    for kind in (RLOOConfig, class_from_source(path)):
        beta = options_of(kind)[0]
        assert (beta.name, beta.annotation, beta.default) == ("beta", float, 0.05)
        assert (beta.owner.__name__, beta.is_foreign) == ("RLOOConfig", False)


PACKAGE = __name__.partition(".")[0]
PARSER = rloo.make_parser()


def titles(parser):
    return [group.title for group in parser._action_groups if group._group_actions][1:]


@pytest.mark.parametrize("name", TRAINING)
def test_options_of_transformers_come_last_and_groups_have_titles(name):
    found = titles(TRAINING[name].option_parser())
    method = {"online-dpo": "OnlineDPO", "reward": "Reward"}.get(name, name.upper())
    assert any(title.startswith(f"Configuration of {method}Trainer") for title in found)
    assert found[-1] == "options of transformers.TrainingArguments"
    assert "Datasets to concatenate, with their shares, weights and limits" in found[:-1]
    assert len(set(found)) == len(found)


def test_an_option_stands_with_the_class_that_declares_it_last():
    groups = dict(option_groups(options_of(RLOOConfig)))
    names = {title: [x.name for x in options] for title, options in groups.items()}
    (own, own_names), (shared, shared_names), *_, (last, last_names) = names.items()
    assert own.startswith("Configuration of RLOOTrainer") and shared.startswith("Batches, rewards")
    assert "beta" in own_names
    assert "learning_rate" in shared_names  # it has another default there
    assert last == "options of transformers.TrainingArguments" and "weight_decay" in last_names
    listed = [name for found in names.values() for name in found]
    assert sorted(listed) == sorted(x.name for x in dataclasses.fields(RLOOConfig) if x.init)


def test_a_class_without_words_is_named():
    @dataclass
    class MyOwnArguments:
        first: int = 1

    assert titles(TrlParser(MyOwnArguments)) == [f"options of {PACKAGE}.MyOwnArguments"]


def test_each_option_is_listed_in_one_spelling():
    shown = PARSER.format_help()
    assert "--max_completion_length" in shown
    assert "--max-completion-length" not in shown
    assert "-h, --help" in shown
    assert PARSER.read(["--max-completion-length", "3"]).values == {"max_completion_length": 3}


def test_the_usage_is_one_line_unless_another_is_given():
    assert PARSER.format_help().startswith("usage: trl rloo [options]\n\n")
    assert TrlParser(usage="other", prog="x").format_usage() == "usage: other\n"


def test_options_with_hyphens_alone_are_kept():
    parser = TrlParser()
    parser.add_argument("--with-hyphen", "--other_one", help="x")
    assert "--with-hyphen WITH_HYPHEN, --other_one WITH_HYPHEN" in parser.format_help()
    for word in ("--with-hyphen=1", "--other_one=1", "--other-one=1"):
        assert parser.parse_args([word]).with_hyphen == "1"


def test_options_of_a_parser_by_all_their_words():
    parser = argparse.ArgumentParser(prog="tool")
    one = parser.add_argument("--one", "-o", help="the first")
    flag = parser.add_argument("--no_one", dest="one", action="store_false", help="not it")
    actions = option_actions(parser)
    assert actions["--one"] is actions["-o"] is one and actions["--no_one"] is flag
    assert set(actions) == {"-h", "--help", "--one", "-o", "--no_one"}
    text = short_help(parser, {"some": ["one"]})
    assert "some:" in text and "the first" in text and "not it" not in text
