from dataclasses import fields

import pytest

from trl.cli.arguments import OnlineScriptArguments, ScriptArguments
from trl.cli.parser import TrlParser


@pytest.mark.parametrize("kind", [ScriptArguments, OnlineScriptArguments])
def test_nothing_is_required_and_everything_described(kind):
    built = kind()
    assert built.dataset_name is None
    assert (built.dataset_train_split, built.dataset_test_split) == ("train", "test")
    assert not built.dataset_streaming
    assert all(field.metadata["help"].endswith(".") for field in fields(kind))


def test_online_options_come_after_those_of_the_dataset():
    names = [field.name for field in fields(OnlineScriptArguments)]
    own = ["reward_model_name_or_path", "reward_funcs"]
    assert names == [field.name for field in fields(ScriptArguments)] + own


def test_options_have_their_types():
    words = [
        *("--reward_funcs", "a.b", "c.py:d", "--dataset_streaming"),
        *("--dataset_train_split", "1", "--ignore_bias_buffers", "no"),
    ]
    (built,) = TrlParser(OnlineScriptArguments).parse_args_and_config(words)
    assert built.reward_funcs == ["a.b", "c.py:d"]
    assert built.dataset_train_split == "1"
    assert built.dataset_streaming is True
    assert built.ignore_bias_buffers is False


def test_one_reward_function_is_a_list_in_yaml_too(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("reward_funcs: a.b\n")
    (built,) = TrlParser(OnlineScriptArguments).parse_args_and_config(["--config", str(path)])
    assert built.reward_funcs == ["a.b"]
