import pytest
from accelerate.commands.launch import launch_command_parser

from trl.cli.launch_words import (
    check_launch_options,
    launch_option_names,
    option_name,
    unknown_options,
)
from trl.cli.parser import OptionParser


def test_the_options_of_accelerate_are_those_of_its_parser():
    words = [x for action in launch_command_parser()._actions for x in action.option_strings]
    found = {option_name(word) for word in words if word.startswith("--")}
    assert launch_option_names() == found | {"accelerate_config"}


def test_names_in_words():
    assert option_name("--num-processes=2") == option_name("--num_processes") == "num_processes"
    words = ["--num_processes", "2", "--qqq", "-1", "--multi-gpu"]
    assert unknown_options(words) == ["--qqq"]


def test_what_neither_knows_is_an_error():
    with pytest.raises(ValueError, match=r"^unknown option --num_proceses \(closest: --num_pro"):
        check_launch_options(OptionParser(), ["--num_proceses", "2"])
    check_launch_options(OptionParser(), ["--num_processes", "2"])
