import runpy
from dataclasses import fields

import pytest
from workspace import SCRIPT_TYPES, missing_from_help

from trl.scripts import ppo
from trl.trainer.ppo_config import PPOConfig

NAMES = sorted({f.name for t in (PPOConfig, *SCRIPT_TYPES) for f in fields(t) if f.init})


@pytest.fixture(scope="module")
def parser():
    return ppo.make_parser()


def test_every_option_is_known(parser):
    assert [name for name in NAMES if not parser.knows(name)] == []


def test_help_mentions_every_option(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert missing_from_help(parser, PPOConfig) == []


def test_options_reach_their_dataclasses(parser):
    words = [
        *("--output_dir", "out", "--beta", "0.125", "--use_cpu", "--lora_r", "3"),
        *("--reward_funcs", "a.b", "--test_split_size", "0.5", "--bf16", "false"),
    ]
    script, training, model, mixture = parser.parse_args_and_config(words)
    assert isinstance(training, PPOConfig)
    assert (training.output_dir, training.beta) == ("out", 0.125)
    assert (script.reward_funcs, model.lora_r, mixture.test_split_size) == (["a.b"], 3, 0.5)


def test_options_of_grpo_alone_are_unknown(parser):
    with pytest.raises(ValueError, match="--scale_rewards"):
        parser.parse_args_and_config(["--output_dir", "out", "--scale_rewards", "none"])


def test_the_file_runs_by_its_path(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trl/scripts/ppo.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(ppo.__file__, run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: trl ppo ")
