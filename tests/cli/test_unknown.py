import pytest

from trl.cli.unknown import describe_unknown


@pytest.mark.parametrize(
    ("name", "program", "hint"),
    [
        ("loss_type", "trl rloo", " (an option of `trl grpo`)"),
        ("loss_type", "trl memory-plan", " (an option of `trl grpo`)"),
        ("method", "trl grpo", " (an option of `trl memory-plan`)"),
        ("step", "trl grpo", " (an option of `trl completions`)"),
        ("port", "trl rloo", " (an option of `trl vllm-serve`)"),
        ("loss_type", "train.py", ""),
        ("qqqq", "trl rloo", ""),
        ("no_shuffle_dataset", "trl rloo", ""),
    ],
)
def test_another_command_may_know_it(name, program, hint):
    assert describe_unknown([name], ["beta"], {}, program) == f"unknown option --{name}{hint}"


def test_the_closest_names_come_first():
    found = describe_unknown(["model"], ["models", "beta"], {}, "trl rloo")
    expected = "unknown option --model (closest: --models; an option of `trl vllm-serve`)"
    assert found == expected


def test_keys_of_a_file_are_named_with_it():
    keys = {"betta": "run.yaml", "y": "run.yaml"}
    found = describe_unknown(["x", "betta", "y"], ["beta"], keys, "train.py")
    expected = "unknown option --x; run.yaml: unknown keys betta (closest: beta), y"
    assert found == expected
