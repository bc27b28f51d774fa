import json
import pickle
import shutil
import sys

import pytest
import torch
from datasets import Dataset
from workspace import write_inputs

from trl import rewards
from trl.cli.arguments import OnlineScriptArguments, ScriptArguments
from trl.cli.exit import MAIN_RANK_FIRST
from trl.cli.mixture import DatasetMixtureConfig
from trl.cli.train import (
    KNOWN_REWARDS,
    find_reward,
    load_data,
    reward_functions,
    run_training,
    take_split,
)
from trl.rewards import accuracy_reward, think_format_reward
from trl.scripts import dpo, ppo, rloo
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer


def rows(path, values):
    path.write_text("".join(json.dumps({"prompt": v}) + "\n" for v in values))
    return str(path)


def test_the_reward_model_comes_first():
    names = ["think_format_reward", "accuracy_reward"]
    script = OnlineScriptArguments(reward_model_name_or_path="some/model", reward_funcs=names)
    assert reward_functions(script) == ["some/model", think_format_reward, accuracy_reward]
    assert reward_functions(OnlineScriptArguments(reward_model_name_or_path="m")) == ["m"]


def test_something_must_reward():
    with pytest.raises(ValueError, match="--reward_funcs or --reward_model_name_or_path"):
        reward_functions(OnlineScriptArguments())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_by_its_path(tmp_path, streaming):
    path = rows(tmp_path / "a.jsonl", ["x", "y"])
    script = ScriptArguments(dataset_name=path, dataset_streaming=streaming)
    found = load_data(script, DatasetMixtureConfig())
    assert [row["prompt"] for row in found["train"]] == ["x", "y"]
    assert isinstance(found["train"], Dataset) is not streaming


def test_a_mixture_wins_and_says_so(tmp_path, capsys):
    entries = [
        {"path": "json", "data_files": rows(tmp_path / f"{name}.jsonl", [name])} for name in "ab"
    ]
    mixture = DatasetMixtureConfig(datasets=entries)
    found = load_data(ScriptArguments(dataset_name="absent.jsonl"), mixture)
    assert [row["prompt"] for row in found["train"]] == ["a", "b"]
    note = "Both datasets and dataset_name are given; datasets is used."
    assert note in capsys.readouterr().err.splitlines()


def test_a_mixture_stands_in_the_configuration_file(tmp_path):
    entry = {"path": "json", "data_files": rows(tmp_path / "a.jsonl", ["x", "y"]), "fraction": 1.0}
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"datasets": [entry], "output_dir": "out", "use_cpu": True}))
    words = ["--config", str(path)]
    script, *_, mixture = rloo.make_parser().parse_args_and_config(words)
    found = load_data(script, mixture)["train"]
    assert [row["prompt"] for row in found] == ["x", "y"]


def test_a_dataset_is_required():
    with pytest.raises(ValueError, match="--dataset_name is required"):
        load_data(ScriptArguments(), DatasetMixtureConfig())


def test_splits():
    splits = {"train": "rows", "validation": "others"}
    assert take_split(splits, "validation", "--dataset_test_split") == "others"
    with pytest.raises(ValueError) as error:
        take_split(splits, "test", "--dataset_test_split")
    message = "--dataset_test_split test: the dataset has the splits train, validation."
    assert str(error.value) == message


def test_a_share_of_the_rows_is_kept_for_evaluation(tmp_path):
    """The same ones in each run, whatever the splits are called; other splits stay."""
    for split in ("fit", "other", "held"):
        rows(tmp_path / f"{split}.jsonl", [f"{split} {i}" for i in range(10)])
    script = ScriptArguments(str(tmp_path), dataset_train_split="fit", dataset_test_split="held")
    first, again = (load_data(script, DatasetMixtureConfig(test_split_size=0.25)) for _ in range(2))
    fit, held = list(first["fit"]["prompt"]), list(first["held"]["prompt"])
    assert (len(fit), len(held), len(first["other"])) == (7, 3, 10)
    assert sorted(fit + held) == [f"fit {i}" for i in range(10)]
    assert held == list(again["held"]["prompt"]) != [f"fit {i}" for i in (7, 8, 9)]


def test_what_is_kept_for_evaluation_is_evaluated(inputs, tmp_path, monkeypatch):
    options = {"output_dir": tmp_path, "dataset_name": inputs / "preferences.jsonl"}
    options |= {"num_generations": None, "max_completion_length": None, "reward_funcs": None}
    options |= {"test_split_size": 0.25, "eval_strategy": "steps", "eval_steps": 1}
    monkeypatch.setattr("sys.argv", command(inputs, **options))
    trainers = []

    class Watched(DPOTrainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            trainers.append(self)

    run_training(dpo.make_parser(), Watched)
    (trainer,) = trainers
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (6, 2)
    assert [entry for entry in trainer.state.log_history if "eval_loss" in entry]


def test_options_in_order():
    parser = rloo.make_parser()
    names = [kind.__name__ for kind in parser.dataclass_types]
    assert names == ["OnlineScriptArguments", "RLOOConfig", "ModelConfig", "DatasetMixtureConfig"]
    assert parser.prog == "trl rloo"


def command(folder, **changes):
    options = {
        "model_name_or_path": folder / "tiny-model",
        "dataset_name": folder / "prompts.jsonl",
        "reward_funcs": f"{folder / 'rewards.py'}:exact",
        "output_dir": folder / "out",
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": "true",
        "bf16": "false",
    } | changes
    pairs = [(name, value) for name, value in options.items() if value is not None]
    return ["trl rloo", *(str(word) for name, value in pairs for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("damage", ["weights", "size"])
def test_a_damaged_model_is_one_line(inputs, tmp_path, monkeypatch, capsys, damage):
    model = tmp_path / "model"
    shutil.copytree(inputs / "tiny-model", model)
    if damage == "weights":
        (model / "model.safetensors").write_bytes(b"x")
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    monkeypatch.setattr("sys.argv", command(inputs, model_name_or_path=model))
    with pytest.raises(SystemExit) as end:
        run_training(rloo.make_parser(), RLOOTrainer)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    words = {
        "weights": f"The weights of {model} are damaged: ",
        "size": f"The weights of '{model}' have other shapes than its config.json says; the report",
    }
    assert last.startswith("trl rloo: error: ")
    assert words[damage] in last


def test_resuming_from_the_newest_checkpoint_or_a_path(inputs, tmp_path, monkeypatch, capsys):
    def train(**changes):
        options = {"output_dir": tmp_path, "save_strategy": "steps", "save_steps": 1} | changes
        options |= {"num_generations": 2, "per_device_train_batch_size": 2}
        monkeypatch.setattr("sys.argv", command(inputs, **options))
        run_training(rloo.make_parser(), RLOOTrainer)

    train()
    train(max_steps=2, resume_from_checkpoint="true")
    steps = [json.loads(line)["step"] for line in (tmp_path / "completions/train.jsonl").open()]
    assert sorted(set(steps)) == [0, 1]
    train(max_steps=3, resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert (tmp_path / "checkpoint-3").is_dir()
    with pytest.raises(SystemExit):
        train(temperature=0.5, resume_from_checkpoint="true")
    error = capsys.readouterr().err
    assert "temperature: 1.0 in the checkpoint, 0.5 now" in error and "Traceback" not in error


def test_other_processes_leave_reporting_to_the_main_one(inputs, monkeypatch, capsys):
    """They wait for it to end them; when it does not, they report themselves."""
    waits = []

    def wait(seconds):
        waits.append((seconds, capsys.readouterr().err))

    monkeypatch.setattr("time.sleep", wait)
    monkeypatch.setattr("sys.argv", command(inputs, reward_funcs=None))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        run_training(rloo.make_parser(), RLOOTrainer)
    assert end.value.code == 2
    assert waits == [(MAIN_RANK_FIRST, "")]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl rloo: error: Nothing rewards")
    assert line.endswith(" (process 1)")


def test_a_misspelled_key_of_the_file_is_reported_by_workers_too(inputs, monkeypatch, capsys):
    path = inputs / "c.yaml"
    path.write_text("num_processes: 2\naccelerate_config: multi_cpu\nbetta: 1\n")
    monkeypatch.setattr("sys.argv", command(inputs, config=path))
    with pytest.raises(SystemExit) as end:
        run_training(rloo.make_parser(), RLOOTrainer)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trl rloo: error: {path}: unknown key betta (closest: beta")
    assert "num_processes" not in line


@pytest.mark.parametrize(("rank", "prints"), [(0, True), (1, False)])
def test_workers_told_to_plan_do_not_train(inputs, monkeypatch, capsys, rank, prints):
    monkeypatch.setattr("sys.argv", command(inputs, plan="true", reward_funcs=None))
    monkeypatch.setenv("RANK", str(rank))
    run_training(rloo.make_parser(), RLOOTrainer)
    shown = capsys.readouterr().out
    assert ("Peak: " in shown) is prints
    assert not (inputs / "out").exists()


def test_debugging_shows_where(inputs, monkeypatch):
    monkeypatch.setattr("sys.argv", command(inputs, reward_funcs=None))
    monkeypatch.setenv("TRL_DEBUG", "1")
    with pytest.raises(ValueError, match="Nothing rewards"):
        run_training(rloo.make_parser(), RLOOTrainer)


def test_a_run_saves_its_model(inputs, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("sys.argv", command(inputs))
    run_training(rloo.make_parser(), RLOOTrainer)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"1 of 1 steps done; the model is in {inputs / 'out'}."
    assert "it/s]" not in err, "a file needs no bars"
    saved = AutoModelForCausalLM.from_pretrained(inputs / "out")
    start = AutoModelForCausalLM.from_pretrained(inputs / "tiny-model")
    assert saved.config.to_dict()["hidden_size"] == start.config.to_dict()["hidden_size"]
    assert all(torch.isfinite(weight).all() for weight in saved.parameters())
    assert (inputs / "out" / "completions" / "train.jsonl").read_text().count("\n") == 8


def test_a_value_model_of_ppo_is_trained(inputs, tmp_path, monkeypatch):
    changes = {"value_model_name_or_path": inputs / "tiny-model", "output_dir": tmp_path}
    monkeypatch.setattr("sys.argv", command(inputs, **changes, num_ppo_epochs=1))
    run_training(ppo.make_parser(), PPOTrainer)
    saved = json.loads((tmp_path / "value_model" / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForSequenceClassification"]


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
    assert all(callable(function) for function in KNOWN_REWARDS.values())


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
        ("my_rewards_lookup.SIZE", ("no function 'SIZE'", "It defines my_rewards_lookup.size")),
        ("my_rewards_lookup.py", ("it defines my_rewards_lookup.py:size",)),
        ("my_rewards_lookup.py:", ("it defines my_rewards_lookup.py:size",)),
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
