"""Dataclasses as command lines and YAML files, with the true type of every option."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

import yaml

from .config_file import read_config
from .help import OptionHelp, option_groups
from .options import Option, OptionClass, options_of_class
from .unknown import describe_unknown
from .values import ConversionError, convert, is_flag, is_sequence

NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-inf$")


class OptionParser(argparse.ArgumentParser):
    """Parses options from the command line and from a YAML file given by `--config`.

    The command line wins over the file. An `env` mapping of the file is put into the environment
    first. Errors are one line and name the closest options.

    Args:
        classes: the dataclasses, as `trl.cli.options` describes them.
        kwargs: arguments of `argparse.ArgumentParser`.

    Raises:
        ValueError: if a dataclass has a field called `config`.
    """

    def __init__(self, classes: Sequence[OptionClass] = (), **kwargs: Any):
        looks: dict[str, Any] = {"usage": "%(prog)s [options]", "formatter_class": OptionHelp}
        super().__init__(allow_abbrev=False, **(looks | kwargs))
        self._negative_number_matcher = NUMBER
        self.classes = classes
        self._types: dict[str, Any] = {}
        self._choices: dict[str, tuple[Any, ...]] = {}
        self._legacy: set[str] = set()
        self._defaults_from_config: dict[str, Any] = {}
        self._files: dict[str, str] = {}  # for names in a file that are no options: its path
        self.add_argument("--config", help="YAML file with options; the command line wins.")
        for kind in classes:
            if "config" in {option.name for option in kind.options}:
                raise ValueError(f"{kind.name} must not have a field called config.")
        for title, options in option_groups(classes):
            group = self.add_argument_group(title)
            for option in options:
                self._add(group, option)
        self._add_opposites()
        for kind in classes:
            self._add_legacy(kind.legacy)

    def read(
        self, args: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Convert options without building the dataclasses.

        Returns:
            The value of each option given, and the words that are no options, first those that
            stand for entries of the file, then those of the command line.

        Raises:
            ConversionError: if values do not fit their options; all of them are named.
            FileNotFoundError: if there is no such configuration file.
            ValueError: if that file cannot be used.
        """
        values, from_file, from_line = self.collect(args)
        converted, problems = self.convert(values)
        if problems:
            raise ConversionError(" ".join(problems))
        return converted, from_file, from_line

    def collect(
        self, args: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """As `read`, with the values as they were written."""
        namespace, from_line = self.parse_known_args(list(sys.argv[1:] if args is None else args))
        given = vars(namespace)
        path = given.pop("config", None)
        config = read_config(path) if path else {}
        self._files = {name: str(path) for name in config if name not in self._types}
        from_file = self._take_defaults(config)
        return self._defaults_from_config | given, from_file, from_line

    def convert(self, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Convert values as they were written; returns them, and what is wrong with others."""
        converted, problems = dict(values), []
        for name in values.keys() & self._types.keys():
            try:
                converted[name] = self._converted(name, values[name])
            except ConversionError as error:
                problems.append(str(error))
        return converted, sorted(problems)

    def unknown(self, words: Sequence[str], others: Iterable[str] = ()) -> str:
        """Say which of `words` are no options, with the closest names and the file they are in.

        Args:
            words: as left over by `read`.
            others: names that would also have been legal.
        """
        found = [word[2:].split("=")[0].replace("-", "_") for word in words if word[:2] == "--"]
        if not found:
            return f"unexpected words: {' '.join(words)}"
        return describe_unknown(found, [*self._types, *others], self._files, self.prog)

    def error(self, message: str) -> NoReturn:
        """Print one line and end the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    @property
    def names(self) -> list[str]:
        """All options, names of earlier releases excepted."""
        return [name for name in self._types if name not in self._legacy]

    def knows(self, name: str) -> bool:
        """Whether `name` (with underscores) is an option of a dataclass."""
        return name in self._types or name == "config" or self._is_opposite(name)

    def _is_opposite(self, name: str) -> bool:
        return name.startswith("no_") and is_flag(self._types.get(name[3:]))

    def _take_defaults(self, values: dict[str, Any]) -> list[str]:
        self._defaults_from_config |= {k: v for k, v in values.items() if k in self._types}
        return as_words({k: v for k, v in values.items() if k not in self._types})

    def _add(self, group: Any, option: Option) -> None:
        self._types[option.name] = option.annotation
        if option.choices:
            self._choices[option.name] = option.choices
        text = option.help.replace("%", "%%").replace("%%%%", "%%")
        default = None if option.default is MISSING else option.default
        shown = str(default).replace("%", "%%")
        self._add_option(group, option.name, option.annotation, f"{text} (default: {shown})")

    def _add_option(self, group: Any, name: str, annotation: Any, text: str) -> None:
        options: dict[str, Any] = {"help": text, "dest": name, "default": argparse.SUPPRESS}
        if is_sequence(annotation):
            options["nargs"] = "+"
        elif annotation is Any or is_flag(annotation):
            options |= {"nargs": "?", "const": True}
        if name in self._choices:
            options["metavar"] = f"{{{','.join(map(str, self._choices[name]))}}}"
        group.add_argument(*_spellings(name), **options)

    def _add_opposites(self) -> None:
        hidden = argparse.SUPPRESS
        for name in filter(lambda name: is_flag(self._types[name]), self._types):
            if f"no_{name}" not in self._types:
                names = _spellings(f"no_{name}")
                self.add_argument(
                    *names, dest=name, action="store_false", default=hidden, help=hidden
                )

    def _add_legacy(self, names: dict[str, str | None]) -> None:
        """Old names take the type of what replaces them, or else what YAML makes of a value."""
        for old, new in names.items():
            if old not in self._types:
                self._types[old] = self._types.get(str(new), Any)
                self._legacy.add(old)
                self._add_option(self, old, self._types[old], argparse.SUPPRESS)

    def _converted(self, name: str, value: Any) -> Any:
        annotation = self._types[name]
        if annotation is Any and isinstance(value, str):
            return _scalar(value)
        try:
            found = convert(value, annotation)
        except ConversionError as error:
            raise ConversionError(f"--{name}: {error}.") from None
        if found is not None and name in self._choices:
            self._check_choices(name, found if isinstance(found, list) else [found])
        return found

    def _check_choices(self, name: str, values: list[Any]) -> None:
        choices = self._choices[name]
        wrong = [value for value in values if value not in choices]
        if wrong:
            legal = ", ".join(map(str, choices))
            raise ConversionError(f"--{name}: {wrong[0]!r} is not one of {legal}.")


class TrlParser(OptionParser):
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
        many = isinstance(dataclass_types, Iterable)
        self.dataclass_types = tuple(dataclass_types) if many else (dataclass_types,)
        super().__init__([options_of_class(kind) for kind in self.dataclass_types], **kwargs)

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
            `tuple`: one instance for each dataclass; where options were added by `add_argument`,
            an `argparse.Namespace` of them; then the remaining strings if asked for.

        Raises:
            ValueError: for unknown options.
            FileNotFoundError: if there is no such configuration file.
            SystemExit: with status 2, after one line, for a value that does not fit its option.
        """
        try:
            values, from_file, from_line = self.read(args)
        except ConversionError as error:
            self.error(str(error))
        unused = [*from_file, *from_line]
        if unused and fail_with_unknown_args and not return_remaining_strings:
            raise ValueError(self.unknown(unused))
        built = self.build(values)
        own = {name: value for name, value in values.items() if name not in self._types}
        if own:
            built = (*built, argparse.Namespace(**own))
        if not return_remaining_strings:
            return built
        return (*built, from_file, from_line) if separate_remaining_strings else (*built, unused)

    def parse_args_into_dataclasses(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False
    ) -> tuple[Any, ...]:
        """The same under the name that `transformers.HfArgumentParser` uses."""
        return self.parse_args_and_config(args, return_remaining_strings)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Take defaults for options; return those of no option as command-line words."""
        return self._take_defaults(values)

    def build(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Instantiate the dataclasses with their share of `values`."""
        options = [option for kind in self.classes for option in kind.options]
        missing = [x.name for x in options if x.default is MISSING and x.name not in values]
        if missing:
            self.error(required(missing))
        return tuple(
            kind(**self._share(known, values))
            for kind, known in zip(self.dataclass_types, self.classes, strict=True)
        )

    def _share(self, kind: OptionClass, values: dict[str, Any]) -> dict[str, Any]:
        known = self._legacy.intersection(kind.legacy).union(x.name for x in kind.options)
        return {name: value for name, value in values.items() if name in known}


def required(names: Sequence[str]) -> str:
    """Say that options are required."""
    words = [f"--{name}" for name in names]
    if len(words) == 1:
        return f"{words[0]} is required."
    return f"{', '.join(words[:-1])} and {words[-1]} are required."


def as_words(values: dict[str, Any]) -> list[str]:
    """Write options as command-line words."""
    words: list[str] = []
    for name, value in values.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        words += [f"--{name}", *map(str, items)]
    return words


def _scalar(text: str) -> Any:
    """What YAML makes of a word, or the word."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))
