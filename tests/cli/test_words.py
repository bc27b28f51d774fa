import pytest
from accelerate.commands.launch import launch_command_parser

from trl.cli.words import as_words, describe_unknown, launch_option_names, option_name


def test_the_options_of_accelerate_are_those_of_its_parser():
    words = [x for action in launch_command_parser()._actions for x in action.option_strings]
    found = {option_name(word) for word in words if word.startswith("--")}
    assert launch_option_names() == found | {"accelerate_config"}


def test_names_in_words():
    assert option_name("--num-processes=2") == option_name("--num_processes") == "num_processes"


def test_options_as_words():
    assert as_words({"a": 1, "b": [2, "c"]}) == ["--a", "1", "--b", "2", "c"]


@pytest.mark.parametrize(
    ("name", "program", "hint"),
    [
        ("packing", "trl memory-plan", " (an option of `trl sft`)"),
        ("method", "trl grpo", " (an option of `trl memory-plan`, `trl lengths`)"),
        ("step", "trl grpo", " (an option of `trl completions`)"),
        ("port", "trl rloo", " (an option of `trl vllm-serve`)"),
        ("loss_type", "train.py", ""),
        ("qqqq", "trl rloo", ""),
        ("no_shuffle_dataset", "trl rloo", ""),
    ],
)
def test_another_command_may_know_it(name, program, hint):
    assert describe_unknown([name], ["beta"], {}, program) == f"unknown option --{name}{hint}."


def test_the_closest_names_come_first():
    found = describe_unknown(["model"], ["models", "beta"], {}, "trl rloo")
    expected = "unknown option --model (closest: --models; an option of `trl vllm-serve`)."
    assert found == expected


def test_keys_of_a_file_are_named_with_it():
    keys = {"betta": "run.yaml", "y": "run.yaml"}
    found = describe_unknown(["x", "betta", "y"], ["beta"], keys, "train.py")
    expected = "unknown option --x; run.yaml: unknown keys betta (closest: beta), y."
    assert found == expected
