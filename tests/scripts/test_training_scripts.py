"""The modules that workers are started from, one for each training command."""

import runpy
from dataclasses import fields
from importlib import import_module

import pytest
from workspace import missing_from_help

from trl.cli.commands import TRAINING
from trl.cli.main import main

ONLINE = ("rloo", "grpo", "online-dpo", "ppo")
WORDS = ["--output_dir", "out", "--use_cpu", "--lora_r", "3", "--bf16", "false"]
WORDS += ["--test_split_size", "0.5"]
# Options of one trainer with the values they are to have, and an option that it does not know.
CASES = {
    "sft": (
        {"packing_strategy": "wrapped", "dataset_kwargs": {"skip_prepare_dataset": True}},
        ["--packing_strategy", "wrapped", "--dataset_kwargs", '{"skip_prepare_dataset": true}'],
        "temperature",
    ),
    "dpo": (
        {"loss_type": ["ipo", "sft"], "beta": 0.2},
        ["--loss_type", "ipo", "sft", "--beta", "0.2"],
        "undesirable_weight",
    ),
    "kto": ({"undesirable_weight": 1.5}, ["--undesirable_weight", "1.5"], "rpo_alpha"),
    "reward": (
        {"center_rewards_coefficient": 0.1, "learning_rate": 1e-4, "disable_dropout": True},
        ["--center_rewards_coefficient", "0.1"],
        "beta",
    ),
    "rloo": ({"beta": 0.125}, ["--beta", "0.125"], "loss_type"),
    "grpo": ({"loss_type": "dr_grpo"}, ["--loss_type", "dr_grpo"], "reward_clip_range"),
    "online-dpo": ({"beta": 0.125}, ["--beta", "0.125"], "scale_rewards"),
    "ppo": ({"gamma": 0.5}, ["--gamma", "0.5"], "scale_rewards"),
}


@pytest.fixture(scope="module", params=TRAINING)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def module(name):
    return import_module(f"trl.scripts.{name.replace('-', '_')}")


@pytest.fixture(scope="module")
def parser(module):
    return module.make_parser()


def test_every_option_is_known(name, parser):
    names = {f.name for kind in parser.dataclass_types for f in fields(kind) if f.init}
    assert [option for option in names if not parser.knows(option)] == []
    assert not parser.knows(CASES[name][2])
    assert parser.knows("reward_funcs") == (name in ONLINE)


def test_help_mentions_every_option(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert missing_from_help(parser) == []


def test_options_reach_their_dataclasses(name, parser):
    expected, words, unknown = CASES[name]
    script, training, model, mixture = parser.parse_args_and_config([*WORDS, *words])
    assert {option: getattr(training, option) for option in expected} == expected
    assert (training.output_dir, training.use_cpu, training.bf16) == ("out", True, False)
    assert (script.dataset_train_split, model.lora_r) == ("train", 3)
    assert mixture.test_split_size == 0.5
    with pytest.raises(ValueError, match=f"--{unknown}"):
        parser.parse_args_and_config([*WORDS, f"--{unknown}", "1"])


def test_the_file_runs_by_its_path(name, module, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module.__file__, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(module.__file__, run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: trl {name} ")


def test_mistakes_are_named(capsys):
    with pytest.raises(SystemExit) as end:
        main(["sft", "--model_name_or_path", "m", "--pakcing"])
    assert end.value.code == 2
    words = capsys.readouterr().err
    assert "--pakcing" in words and "packing" in words and "--dataset_name" in words
