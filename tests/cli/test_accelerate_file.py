"""Configuration files of accelerate; what is said of bad ones is in the table of bad inputs."""

import argparse
import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from trl.cli.accelerate_file import find_config, read_accelerate_config, shipped_configs

EXAMPLES = Path(__file__).parents[2] / "examples" / "accelerate_configs"


@pytest.mark.parametrize("path", [*shipped_configs().values(), *map(str, EXAMPLES.iterdir())])
def test_good_files_are_read_as_accelerate_reads_them(path):
    config = read_accelerate_config(path)
    assert config == yaml.safe_load(Path(path).read_text())
    theirs = load_config_from_file(path)
    assert theirs.num_processes == config["num_processes"]
    assert theirs.distributed_type.value == config["distributed_type"]


@pytest.mark.parametrize(
    "config",
    [
        {"distributed_type": False, "num_processes": 1},  # NO without quotes
        {"distributed_type": "NO", "num_processes": -1, "main_process_port": None},
        {"distributed_type": "MULTI_GPU", "mixed_precision": "BF16", "fp16": False},
        {"compute_environment": "AMAZON_SAGEMAKER", "iam_role_name": "x"},
    ],
)
def test_what_accelerate_takes_is_not_refused(tmp_path, config):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config))
    assert read_accelerate_config(str(path)) == config


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"The accelerate configuration {path} cannot be used: "):
        read_accelerate_config(str(path))


def test_files_come_before_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(find_config("zero2")).name == "zero2.yaml"
    Path("zero2").write_text("")
    assert find_config("zero2") == "zero2"
    with pytest.raises(argparse.ArgumentTypeError, match="closest: fsdp2"):
        find_config("fsdp22")
