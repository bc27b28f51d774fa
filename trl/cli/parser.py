"""Dataclasses as command lines and YAML files, with the true type of every option."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from .values import ConversionError, convert, is_flag, is_sequence

NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-inf$")


class TrlParser(argparse.ArgumentParser):
    """Parses dataclasses from the command line and from a YAML file given by `--config`.

    The command line wins over the file, the file over the defaults. An `env` mapping of the file
    is put into the environment first. Errors are one line and name the closest options.

    Args:
        dataclass_types: one dataclass or several; none may have a field called `config`. A class
            attribute `legacy_options` (old name -> new name) lists keyword arguments the class
            accepts besides its fields.
        kwargs: arguments of `argparse.ArgumentParser`.

    Raises:
        ValueError: if a dataclass has a field called `config`.

    Example:

    ```python
    parser = TrlParser((ScriptArguments, RLOOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    ```
    """

    def __init__(self, dataclass_types: Any = (), **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)
        self._negative_number_matcher = NUMBER
        many = isinstance(dataclass_types, Iterable)
        self.dataclass_types = tuple(dataclass_types) if many else (dataclass_types,)
        self._types: dict[str, Any] = {}
        self._defaults_from_config: dict[str, Any] = {}
        self.add_argument("--config", help="YAML file with options; the command line wins.")
        for dataclass_type in self.dataclass_types:
            self._add_fields(dataclass_type)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Build the dataclasses from command line and configuration file.

        Args:
            args (`list[str]`, *optional*): the words; None: those of the process.
            return_remaining_strings (`bool`): also return what no dataclass knows.
            fail_with_unknown_args (`bool`): otherwise, whether that is an error.
            separate_remaining_strings (`bool`): return what the file and what the command line
                left over as two lists.

        Returns:
            `tuple`: one instance for each dataclass, then the remaining strings if asked for.

        Raises:
            ValueError: for unknown options.
            FileNotFoundError: if there is no such configuration file.
        """
        values, from_file, from_line = self.read(args)
        separate = return_remaining_strings and separate_remaining_strings
        if not return_remaining_strings and fail_with_unknown_args and (from_file or from_line):
            raise ValueError(self.unknown([*from_file, *from_line]))
        built = self.build(values)
        if separate:
            return (*built, from_file, from_line)
        return (*built, [*from_file, *from_line]) if return_remaining_strings else built

    def parse_args_into_dataclasses(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False
    ) -> tuple[Any, ...]:
        """The same under the name that `transformers.HfArgumentParser` uses."""
        return self.parse_args_and_config(args, return_remaining_strings)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Take defaults for options; return those of no option as command-line words."""
        self._defaults_from_config |= {k: v for k, v in values.items() if k in self._types}
        return as_words({k: v for k, v in values.items() if k not in self._types})

    def read(
        self, args: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Return option values, and the words that neither file nor line could place."""
        words = list(sys.argv[1:] if args is None else args)
        namespace, from_line = self.parse_known_args(words)
        given = vars(namespace)
        path = given.pop("config", None)
        config = read_config(path) if path else {}
        from_file = self.set_defaults_with_config(**config)
        values = self._defaults_from_config | given
        converted = {name: self._converted(name, value) for name, value in values.items()}
        return converted, from_file, from_line

    def build(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Instantiate the dataclasses with their share of `values`."""
        built = []
        for dataclass_type in self.dataclass_types:
            known = _names(dataclass_type)
            own = {name: value for name, value in values.items() if name in known}
            missing = [
                f.name for f in _fields(dataclass_type) if _is_required(f) and f.name not in own
            ]
            if missing:
                self.error(f"--{missing[0]} is required.")
            built.append(dataclass_type(**own))
        return tuple(built)

    def unknown(self, words: Sequence[str], others: Iterable[str] = ()) -> str:
        """Say which of `words` are no options, with the closest names.

        Args:
            words: as left over by `read`.
            others: names that would also have been legal.
        """
        legal = [*self._types, *others]
        found = []
        for word in words:
            if not word.startswith("--"):
                continue
            name = word[2:].split("=")[0].replace("-", "_")
            close = difflib.get_close_matches(name, legal, n=3, cutoff=0.6)
            hint = f" (closest: {', '.join('--' + c for c in close)})" if close else ""
            found.append(f"--{name}{hint}")
        if not found:
            return f"unexpected words: {' '.join(words)}"
        return f"unknown option{'s' if len(found) > 1 else ''} {', '.join(found)}"

    def error(self, message: str) -> NoReturn:
        """Print one line and end the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def knows(self, name: str) -> bool:
        """Whether `name` (with underscores) is an option of a dataclass."""
        return name in self._types or name == "config" or name.removeprefix("no_") in self._types

    def _add_fields(self, dataclass_type: Any) -> None:
        hints = typing.get_type_hints(dataclass_type)
        group = self.add_argument_group(dataclass_type.__name__)
        for field in _fields(dataclass_type):
            if field.name == "config":
                raise ValueError(f"{dataclass_type.__name__} must not have a field called config.")
            if field.name in self._types:
                continue
            annotation = self._types[field.name] = hints[field.name]
            self._add_option(group, field, annotation)
        for old, new in getattr(dataclass_type, "legacy_options", {}).items():
            self._types[old] = hints.get(new)
            group.add_argument(
                *_spellings(old),
                dest=old,
                nargs="?",
                const=True,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )

    def _add_option(self, group: Any, field: dataclasses.Field, annotation: Any) -> None:
        text = str(field.metadata.get("help", "")).replace("%", "%%")
        default = None if _is_required(field) else _default(field)
        options: dict[str, Any] = {"help": f"{text} (default: {default})".replace("%%%%", "%%")}
        if is_sequence(annotation):
            options["nargs"] = "+"
        elif is_flag(annotation):
            options |= {"nargs": "?", "const": True}
        names = _spellings(field.name)
        group.add_argument(*names, dest=field.name, default=argparse.SUPPRESS, **options)
        if default is True and is_flag(annotation):
            group.add_argument(
                *_spellings(f"no_{field.name}"),
                dest=field.name,
                action="store_false",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )

    def _converted(self, name: str, value: Any) -> Any:
        annotation = self._types[name]
        if annotation is None:  # an old option without a new one: its type is YAML's choice
            return yaml.safe_load(value) if isinstance(value, str) else value
        try:
            return convert(value, annotation)
        except ConversionError as error:
            self.error(f"--{name}: {error}.")


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options, and put its `env` mapping into the environment.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no YAML, or it or its `env` is no mapping.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        config = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a mapping of option names to values.")
    environment = config.pop("env", {})
    if not isinstance(environment, dict):
        raise ValueError(f"env in {path} must be a mapping of names to values.")
    os.environ.update({str(name): str(value) for name, value in environment.items()})
    return config


def as_words(values: dict[str, Any]) -> list[str]:
    """Write options as command-line words: a true flag alone, a false one not at all."""
    words: list[str] = []
    for name, value in values.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, (list, tuple)):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words


def _spellings(name: str) -> list[str]:
    return [f"--{spelling}" for spelling in dict.fromkeys((name, name.replace("_", "-")))]


def _fields(dataclass_type: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(dataclass_type) if field.init]


def _names(dataclass_type: Any) -> set[str]:
    fields = {field.name for field in _fields(dataclass_type)}
    return fields | set(getattr(dataclass_type, "legacy_options", {}))


def _is_required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if callable(field.default_factory) else None
