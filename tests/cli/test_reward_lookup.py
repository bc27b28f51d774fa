import pickle
import sys

import pytest

from trl import rewards
from trl.cli.reward_lookup import find_reward, known_rewards


@pytest.fixture(autouse=True)
def fresh_imports(monkeypatch):
    """Imports of a test are forgotten after it."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards_lookup.py").write_text(
        "SIZE = 3\n\ndef size(completions, **kwargs):\n    return [SIZE] * len(completions)\n"
    )
    (tmp_path / "my_package_lookup").mkdir()
    (tmp_path / "my_package_lookup" / "__init__.py").write_text("")
    (tmp_path / "my_package_lookup" / "inner.py").write_text("def one(**kwargs):\n    return [1]\n")
    return tmp_path


def test_known_names():
    for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"):
        assert find_reward(name) is getattr(rewards, name)


def test_soft_overlong_punishment_has_the_lengths_of_the_paper():
    punish = find_reward("get_soft_overlong_punishment")
    lengths = [1024, 1152, 1280, 1281]
    assert punish(completion_ids=[[0] * n for n in lengths]) == [0.0, -0.5, -1.0, -1.0]


def test_known_names_are_callable():
    assert all(callable(function) for function in known_rewards().values())


@pytest.mark.parametrize("name", ["my_rewards_lookup.size", "my_rewards_lookup.py:size"])
def test_the_current_folder_is_searched(folder, name):
    function = find_reward(name)
    assert function(completions=["a", "b"]) == [3, 3]
    assert pickle.loads(pickle.dumps(function)).__name__ == "size"


def test_a_package(folder):
    assert find_reward("my_package_lookup.inner.one")() == [1]


def test_a_path_to_a_file_elsewhere(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "far_lookup.py"
    path.write_text("def two(**kwargs):\n    return [2]\n")
    assert find_reward(f"{path}:two")() == [2]


def test_installed_modules():
    assert find_reward("trl.rewards.think_format_reward") is rewards.think_format_reward


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("acuracy_reward", ("acuracy_reward", "Did you mean accuracy_reward?")),
        ("qqq", ("Known names: accuracy_reward, ",)),
        ("absent_lookup.function", ("no module 'absent_lookup'",)),
        ("my_package_lookup.absent.one", ("no module 'my_package_lookup.absent'",)),
        ("absent_lookup.py:function", ("there is no such file",)),
        ("my_rewards_lookup.sise", ("my_rewards_lookup", "'sise'", "Did you mean size?")),
        ("my_rewards_lookup.py:sise", ("'sise'", "Did you mean size?")),
        ("my_rewards_lookup.SIZE", ("no function 'SIZE'",)),
    ],
)
def test_mistakes(folder, name, parts):
    with pytest.raises(ValueError, match="--reward_funcs ") as error:
        find_reward(name)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import some_absent_package", "ModuleNotFoundError: No module named 'some_absent_package"),
        ("x = 1\n1 / 0", "ZeroDivisionError: division by zero"),
        ("def x(:", "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("separator", [".", ".py:"])
def test_a_module_that_cannot_be_loaded(folder, text, problem, separator):
    name = f"broken_{problem.partition(':')[0].lower()}"
    (folder / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match="loading it failed") as error:
        find_reward(f"{name}{separator}reward")
    message = str(error.value)
    assert problem in message
    assert f"{name}.py, line {text.count(chr(10)) + 1})." in message
