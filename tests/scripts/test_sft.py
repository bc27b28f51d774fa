from dataclasses import fields

import pytest

from trl.cli.arguments import ScriptArguments
from trl.cli.main import main
from trl.data.mixture import DatasetMixtureConfig
from trl.scripts import sft
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig

CLASSES = (SFTConfig, ScriptArguments, ModelConfig, DatasetMixtureConfig)
NAMES = sorted({f.name for kind in CLASSES for f in fields(kind) if f.init})


@pytest.fixture(scope="module")
def parser():
    return sft.make_parser()


def test_every_option_is_known(parser):
    assert [name for name in NAMES if not parser.knows(name)] == []
    assert not any(map(parser.knows, ("reward_funcs", "temperature", "beta")))


def test_options_reach_their_dataclasses(parser):
    words = ["--output_dir", "out", "--packing", "--use_cpu", "--lora_r", "3", "--bf16", "false"]
    words += ["--packing_strategy", "wrapped", "--dataset_kwargs", '{"skip_prepare_dataset": true}']
    script, training, model, _ = parser.parse_args_and_config(words)
    assert training.packing and training.packing_strategy == "wrapped"
    assert training.dataset_kwargs == {"skip_prepare_dataset": True}
    assert (script.dataset_train_split, model.lora_r) == ("train", 3)


def test_mistakes_are_named(capsys):
    with pytest.raises(SystemExit) as end:
        main(["sft", "--model_name_or_path", "m", "--pakcing"])
    assert end.value.code == 2
    words = capsys.readouterr().err
    assert "--pakcing" in words and "packing" in words and "--dataset_name" in words
