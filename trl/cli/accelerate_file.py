"""Find accelerate's configuration files by path or name, and check them before they are used."""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DistributedType, PrecisionType


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_process_count(value: object) -> bool:
    # -1 leaves the number to --num_processes.
    return _is_whole_number(value) and (value >= 1 or value == -1)  # type: ignore[operator]


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_precision(value: object) -> bool:
    return isinstance(value, str) and value.lower() in PrecisionType.list()


def _is_distributed_type(value: object) -> bool:
    # YAML reads NO without quotes as False. accelerate accepts that.
    return value is False or value in DISTRIBUTED_TYPES


DISTRIBUTED_TYPES = [member.value for member in DistributedType]
LEGACY_KEYS = {"dynamo_backend", "fp16"}  # accelerate still accepts them
LEGAL_KEYS = {field.name for field in dataclasses.fields(ClusterConfig)} | LEGACY_KEYS


@dataclass(frozen=True)
class Check:
    """A check of the value of a key, and what a legal value is, for the error."""

    is_legal: Callable[[object], bool]
    expected: str


WHOLE_NUMBER = Check(_is_whole_number, "a whole number")
BOOLEAN = Check(_is_boolean, "true or false")
MAPPING = Check(_is_mapping, "a mapping of names to values")
CHECKS = {
    **{name: MAPPING for name in LEGAL_KEYS if name.endswith("_config")},
    "debug": BOOLEAN,
    "distributed_type": Check(_is_distributed_type, f"one of {', '.join(DISTRIBUTED_TYPES)}"),
    "enable_cpu_affinity": BOOLEAN,
    "machine_rank": WHOLE_NUMBER,
    "main_process_port": WHOLE_NUMBER,
    "mixed_precision": Check(_is_precision, f"one of {', '.join(PrecisionType.list())}, in quotes"),
    "num_machines": WHOLE_NUMBER,
    "num_processes": Check(_is_process_count, "a whole number, at least 1"),
    "same_network": BOOLEAN,
    "tpu_use_cluster": BOOLEAN,
    "use_cpu": BOOLEAN,
}


def find_config(name: str) -> str:
    """Return a configuration file by its path, or a shipped one by its name.

    This is a `type` of argparse, so errors are `ArgumentTypeError`.
    """
    shipped = shipped_configs()
    if Path(name).is_file():
        return name
    if name in shipped:
        return shipped[name]
    names = ", ".join(sorted(shipped))
    if not name:
        raise argparse.ArgumentTypeError(f"give a file, or one of {names}")
    closest = difflib.get_close_matches(name, shipped, n=1) or [names]
    raise argparse.ArgumentTypeError(
        f"{name}: there is no such file, and no shipped configuration of that name (closest: "
        f"{closest[0]})"
    )


def shipped_configs() -> dict[str, str]:
    """Return the paths of the configurations in this package, by name."""
    folder = resources.files("trl").joinpath("accelerate_configs")
    return {
        Path(file.name).stem: str(file) for file in folder.iterdir() if file.name.endswith(".yaml")
    }


def read_accelerate_config(path: str) -> dict[str, Any]:
    """Read and check a configuration file of accelerate, YAML or JSON.

    Files for SageMaker have other keys, so they are not checked.

    Raises:
        ValueError: names the file and the first error in it.
    """
    try:
        return _read_and_check(Path(path))
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"The accelerate configuration {path} cannot be used: {problem}."
        ) from None


def _read_and_check(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    config = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(config, dict):
        raise ValueError("it must be a mapping of names to values")
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        return config
    if "distributed_type" not in config:
        raise ValueError(f"distributed_type is missing (one of {', '.join(DISTRIBUTED_TYPES)})")
    for key, value in config.items():
        _check_entry(key, value)
    return config


def _check_entry(key: str, value: object) -> None:
    if key not in LEGAL_KEYS:
        closest = difflib.get_close_matches(str(key), LEGAL_KEYS, n=1)
        hint = f" (closest: {closest[0]})" if closest else ""
        raise ValueError(f"unknown key {key}{hint}")
    if value is None or key not in CHECKS:
        return
    check = CHECKS[key]
    if not check.is_legal(value):
        yaml_text = "no" if value is False else json.dumps(value, default=str)
        raise ValueError(f"{key}: {yaml_text} must be {check.expected}")
