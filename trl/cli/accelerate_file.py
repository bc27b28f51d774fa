"""Configuration files of accelerate: found by path or name, and checked before it reads them."""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DistributedType, PrecisionType


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_process_count(value: Any) -> bool:
    return _is_whole_number(value) and (value >= 1 or value == -1)  # -1: --num_processes says it


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_precision(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in PrecisionType.list()


def _is_distributed_type(value: Any) -> bool:
    # YAML reads NO without quotes as a boolean, which accelerate takes.
    return value is False or value in DISTRIBUTED_TYPES


DISTRIBUTED_TYPES = [kind.value for kind in DistributedType]
LEGACY_KEYS = {"dynamo_backend", "fp16"}  # which accelerate still takes
LEGAL_KEYS = {field.name for field in dataclasses.fields(ClusterConfig)} | LEGACY_KEYS
# For each key, whether a value is legal, and what it must be.
Check = tuple[Callable[[Any], bool], str]
NUMBER: Check = (_is_whole_number, "a whole number")
SWITCH: Check = (_is_switch, "true or false")
MAPPING: Check = (_is_mapping, "a mapping of names to values")
CHECKS: dict[str, Check] = {
    **{name: MAPPING for name in LEGAL_KEYS if name.endswith("_config")},
    "debug": SWITCH,
    "distributed_type": (_is_distributed_type, f"one of {', '.join(DISTRIBUTED_TYPES)}"),
    "enable_cpu_affinity": SWITCH,
    "machine_rank": NUMBER,
    "main_process_port": NUMBER,
    "mixed_precision": (_is_precision, f"one of {', '.join(PrecisionType.list())}, in quotes"),
    "num_machines": NUMBER,
    "num_processes": (_is_process_count, "a whole number, at least 1"),
    "same_network": SWITCH,
    "tpu_use_cluster": SWITCH,
    "use_cpu": SWITCH,
}


def find_config(name: str) -> str:
    """The configuration file at a path, or the shipped one of that name; for argparse."""
    shipped = shipped_configs()
    if Path(name).is_file():
        return name
    if name in shipped:
        return shipped[name]
    names = ", ".join(sorted(shipped))
    if not name:
        raise argparse.ArgumentTypeError(f"give a file, or one of {names}")
    close = difflib.get_close_matches(name, shipped, n=1) or [names]
    problem = "there is no such file, and no shipped configuration of that name"
    raise argparse.ArgumentTypeError(f"{name}: {problem} (closest: {close[0]})")


def shipped_configs() -> dict[str, str]:
    """The paths of the configurations that come with this package, by name."""
    folder = resources.files("trl").joinpath("accelerate_configs")
    return {Path(f.name).stem: str(f) for f in folder.iterdir() if f.name.endswith(".yaml")}


def read_accelerate_config(path: str) -> dict[str, Any]:
    """Read a configuration file of accelerate, YAML or JSON.

    Raises:
        ValueError: names the file and the first mistake in it. Files for SageMaker have other keys
            and are left to accelerate.
    """
    try:
        return _read(Path(path))
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"The accelerate configuration {path} cannot be used: {problem}."
        ) from None


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    config = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(config, dict):
        raise ValueError("it must be a mapping of names to values")
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        return config
    if "distributed_type" not in config:
        raise ValueError(f"distributed_type is missing (one of {', '.join(DISTRIBUTED_TYPES)})")
    for key, value in config.items():
        _check(key, value)
    return config


def _check(key: Any, value: Any) -> None:
    if key not in LEGAL_KEYS:
        close = difflib.get_close_matches(str(key), LEGAL_KEYS, n=1)
        hint = f" (closest: {close[0]})" if close else ""
        raise ValueError(f"unknown key {key}{hint}")
    if value is None or key not in CHECKS:
        return
    is_legal, expected = CHECKS[key]
    if not is_legal(value):
        text = "no" if value is False else json.dumps(value, default=str)  # as YAML writes it
        raise ValueError(f"{key}: {text} must be {expected}")
