from accelerate.commands.launch import launch_command_parser

from trl.cli.argv import launch_option_names, option_name, required_options_error, to_argv


def test_the_options_of_accelerate_are_those_of_its_parser():
    words = [x for action in launch_command_parser()._actions for x in action.option_strings]
    found = {option_name(word) for word in words if word.startswith("--")}
    assert launch_option_names() == found | {"accelerate_config"}


def test_names_in_arguments():
    assert option_name("--num-processes=2") == option_name("--num_processes") == "num_processes"


def test_options_as_arguments():
    assert to_argv({"a": 1, "b": [2, "c"]}) == ["--a", "1", "--b", "2", "c"]


def test_required_options_are_named():
    assert required_options_error(["a"]) == "--a is required."
    assert required_options_error(["a", "b", "c"]) == "--a, --b and --c are required."
