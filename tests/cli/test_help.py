import argparse
import dataclasses
from dataclasses import dataclass

import pytest

from trl.cli import memory_plan
from trl.cli.help import TITLES, OptionHelp, option_groups, title
from trl.cli.options import options_of
from trl.cli.parser import TrlParser
from trl.scripts import grpo, rloo
from trl.trainer.rloo_config import RLOOConfig

PARSERS = [rloo.make_parser(), grpo.make_parser(), memory_plan.make_parser()]


def titles(parser):
    return [group.title for group in parser._action_groups if group._group_actions][1:]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_options_of_transformers_come_last_and_groups_have_titles(parser):
    found = titles(parser)
    assert set(found) <= set(TITLES.values())
    assert found[-1] == TITLES["TrainingArguments"]
    assert "mixture of datasets" in found[:-1]


def test_an_option_stands_with_the_class_that_declares_it_last():
    groups = dict(option_groups(options_of(RLOOConfig)))
    names = {title: [x.name for x in options] for title, options in groups.items()}
    assert list(names)[:2] == ["RLOO", title("OnlineConfig")]
    assert "beta" in names["RLOO"]
    assert "learning_rate" in names[title("OnlineConfig")]  # it has another default there
    assert "weight_decay" in names[title("TrainingArguments")]
    listed = [name for found in names.values() for name in found]
    assert sorted(listed) == sorted(x.name for x in dataclasses.fields(RLOOConfig) if x.init)


def test_the_name_of_a_class_is_a_title():
    @dataclass
    class MyOwnArguments:
        first: int = 1

    assert titles(TrlParser(MyOwnArguments)) == ["my own arguments"]


def test_each_option_is_listed_in_one_spelling():
    shown = PARSERS[0].format_help()
    assert "--max_completion_length" in shown
    assert "--max-completion-length" not in shown
    assert "-h, --help" in shown
    assert PARSERS[0].read(["--max-completion-length", "3"])[0] == {"max_completion_length": 3}


def test_the_usage_is_one_line_unless_another_is_given():
    assert PARSERS[0].format_help().startswith("usage: trl rloo [options]\n\n")
    assert TrlParser(usage="other", prog="x").format_usage() == "usage: other\n"


def test_options_with_hyphens_alone_are_kept():
    parser = argparse.ArgumentParser(formatter_class=OptionHelp)
    parser.add_argument("--with-hyphen", "--other_one", "--other-one", help="x")
    assert "--with-hyphen WITH_HYPHEN, --other_one WITH_HYPHEN" in parser.format_help()
