import os

import pytest

from trl.cli.config_file import read_config


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def test_names_have_underscores_and_the_environment_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_TEST_VALUE", "before")
    text = "max-steps: 1\nbeta: 0.5\nenv: {TRL_TEST_VALUE: 7}\nlr_scheduler_kwargs: {a-b: 1}\n"
    expected = {"max_steps": 1, "beta": 0.5, "lr_scheduler_kwargs": {"a-b": 1}}
    assert read_config(write(tmp_path, text)) == expected
    assert os.environ["TRL_TEST_VALUE"] == "7"
    assert read_config(write(tmp_path, "")) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("beta: 1\nseed: 2\nbeta: 1\n", "the key beta is given twice, in lines 1 and 3."),
        ("{beta: 1, beta: 2}", "the key beta is given twice, in lines 1 and 1."),
        ("seed: 1\nenv:\n  A: 1\n  A: 2\n", "the key A is given twice, in lines 3 and 4."),
        ("max_steps: 1\nmax-steps: 2\n", "the key max_steps is given twice, once with hyphens."),
    ],
)
def test_a_key_that_stands_twice_is_an_error(tmp_path, text, problem):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_config(path)
    assert str(error.value) == f"{path}: {problem}"


def test_a_merged_mapping_may_be_overruled(tmp_path):
    text = "a: &one {x: 1, y: 2}\nb: {<<: *one, x: 3}\n"
    assert read_config(write(tmp_path, text))["b"] == {"x": 3, "y": 2}
