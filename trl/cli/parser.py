"""Dataclasses as command lines and YAML files, with the true type of every option."""

import argparse
import ast
import dataclasses
import difflib
import importlib.util
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..suggestions import commonly_meant
from .options import Option, option_actions, option_groups, options_of
from .values import ConversionError, convert, is_flag, is_sequence, read_config

INTERRUPTED = 128 + signal.SIGINT  # status of a process that Ctrl-C has ended
NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-inf$")


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line and end the process with status 2."""
        option = re.sub(r"^argument (--[^/:]+)[^:]*:", r"\1:", message)
        self.exit(2, f"{self.prog}: error: {option}\n")

    @property
    def names(self) -> list[str]:
        """Names of all options, with underscores."""
        return self.all_names

    @property
    def all_names(self) -> list[str]:
        """Names of all options, with underscores, and those that earlier releases had for them."""
        return [action.dest for action in self._actions if action.option_strings]


class TrlParser(OneLineParser):
    """Parses dataclasses from the command line and from a YAML file given by `--config`.

    The command line wins over the file, the file over the defaults. An `env` mapping of the file
    is put into the environment first. Errors are one line and name the closest options.

    `dataclass_types` is one or several, without a field called `config`; their attribute
    `legacy_options` lists old names of fields with the new ones, if there are any. `commands_with`
    names the commands that have an option, for errors; `kwargs` are those of
    `argparse.ArgumentParser`.

    ```python
    parser = TrlParser((ScriptArguments, RLOOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    ```
    """

    def __init__(
        self,
        dataclass_types: Any = (),
        *,
        commands_with: Callable[[str], list[str]] | None = None,
        **kwargs: Any,
    ):
        self._commands_with = commands_with
        super().__init__(allow_abbrev=False, **({"usage": "%(prog)s [options]"} | kwargs))
        self._negative_number_matcher = NUMBER
        many = isinstance(dataclass_types, Iterable)
        self.dataclass_types = tuple(dataclass_types) if many else (dataclass_types,)
        self._options: dict[str, Option] = {}
        self._legacy: set[str] = set()
        self._defaults_from_config: dict[str, Any] = {}
        self._files: dict[str, str] = {}  # for names in a file that are not options: its path
        self.add_argument("--config", help="YAML file with options; the command line wins.")
        found = []
        for kind in self.dataclass_types:
            found += options_of(kind)
            if "config" in _field_names(kind):
                raise ValueError(f"{kind.__name__} must not have a field called config.")
        for title, options in option_groups(found):
            group = self.add_argument_group(title)
            for option in options:
                self._add(group, option)
        hidden: dict[str, Any] = {"action": "store_false"}
        hidden |= dict.fromkeys(("default", "help"), argparse.SUPPRESS)
        for option in self._options.values():
            if is_flag(option.annotation) and f"no_{option.name}" not in self._options:
                self.add_argument(f"--no_{option.name}", dest=option.name, **hidden)
        for kind in self.dataclass_types:
            self._add_legacy(getattr(kind, "legacy_options", {}))

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Build the dataclasses from the words `args`, by default the process's, and the file.

        After them come a namespace of options that `add_argument` added, and, if asked for, the
        words that no dataclass knows, or those of the file and of the command line apart. A
        ValueError names unknown options; a value that does not fit ends the process with status 2.
        """
        try:
            values, others, from_line = self.read(args)
        except ConversionError as error:
            self.error(str(error))
        from_file = as_words(others)
        unused = [*from_file, *from_line]
        if fail_with_unknown_args and not return_remaining_strings:
            self.check(unused)
        built = self.build(values)
        own = {name: value for name, value in values.items() if name not in self._options}
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
        return as_words(self._take_defaults(values))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in `argparse`, but options may be spelled with hyphens, too."""
        words = list(sys.argv[1:] if args is None else args)
        for place, word in enumerate(words):
            option = word.partition("=")[0]
            is_option = option.startswith("--") and option not in option_actions(self)
            if is_option and self.knows(option_name(option)):
                words[place] = f"--{option_name(option)}{word.removeprefix(option)}"
        return super().parse_known_args(words, namespace)

    def read(
        self, args: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Convert options without building the dataclasses.

        Returns the value of each option given, entries of the file that are not options, and words
        of the command line that are none. A `ConversionError` names all values that do not fit;
        for the file see `read_config`.
        """
        values, problems, others, words = self.collect(args)
        if problems:
            raise ConversionError(" ".join(problems))
        return values, others, words

    def collect(
        self, args: Sequence[str] | None = None
    ) -> tuple[dict[str, Any], list[str], dict[str, Any], list[str]]:
        """As `read`, but what is wrong with values is returned, after the values."""
        namespace, words = self.parse_known_args(args)
        given = vars(namespace)
        path = given.pop("config", None)
        others = self._take_defaults(read_config(path) if path else {})
        self._files = dict.fromkeys(others, str(path))
        values = self._defaults_from_config | given
        problems = []
        for name in values.keys() & self._options.keys():
            try:
                values[name] = self._converted(self._options[name], values[name])
            except ConversionError as error:
                problems.append(str(error))
        return values, sorted(problems), others, words

    def build(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Instantiate the dataclasses with their share of `values`."""
        missing = [
            name
            for kind in self.dataclass_types
            for name, field in _field_names(kind).items()
            if name not in values and field.default is field.default_factory is MISSING
        ]
        if missing:
            self.error(required(missing))
        built = []
        for kind in self.dataclass_types:
            legacy = self._legacy.intersection(getattr(kind, "legacy_options", ()))
            names = legacy.union(_field_names(kind))
            built.append(kind(**{name: value for name, value in values.items() if name in names}))
        return tuple(built)

    def check(self, words: Sequence[str], others: Collection[str] = ()) -> None:
        """Refuse words that are left over, options of another program (`others`) excepted."""
        if problem := self.unknown(words, others):
            raise ValueError(problem)

    def unknown(self, words: Sequence[str], others: Collection[str] = ()) -> str:
        """What `check` would raise; an empty string for nothing."""
        names = [option_name(word) for word in words if word.startswith("--")]
        unknown = [name for name in names if name not in others]
        if not unknown:
            return "" if others or not words else f"unexpected words: {' '.join(words)}."
        legal, places = [*self._options, *sorted(others)], dict[str, list[str]]()
        for name in unknown:  # by the file that they stand in
            path = self._files.get(name, "")
            places.setdefault(path, []).append(self._with_hint(name, legal, "" if path else "--"))
        parts = []
        for path, hints in places.items():
            kind = f"{path}: unknown key" if path else "unknown option"
            parts.append(f"{kind}{'s' * (len(hints) > 1)} {', '.join(hints)}")
        return f"{'; '.join(parts)}."

    def _with_hint(self, name: str, legal: list[str], dashes: str) -> str:
        close = difflib.get_close_matches(name, legal, n=3, cutoff=0.6)
        meant = commonly_meant(name, legal)
        if meant is not None:
            close = [meant, *(other for other in close if other != meant)][:3]
        hints = [f"closest: {', '.join(dashes + other for other in close)}"] if close else []
        if self._commands_with is not None:
            commands = self._commands_with(name)
            hints += [f"an option of `trl {'`, `trl '.join(commands)}`"] if commands else []
        words = f" ({'; '.join(hints)})" if hints else ""
        return f"{dashes}{name}{words}"

    @property
    def names(self) -> list[str]:
        """All options, names of earlier releases excepted."""
        return [name for name in self._options if name not in self._legacy]

    def default(self, name: str) -> Any:
        """The default of an option."""
        return self._options[name].default

    def knows(self, name: str) -> bool:
        """Whether `name` (with underscores) may be given, with hyphens in front."""
        return f"--{name}" in option_actions(self)

    def _take_defaults(self, values: dict[str, Any]) -> dict[str, Any]:
        self._defaults_from_config |= {k: v for k, v in values.items() if k in self._options}
        return {k: v for k, v in values.items() if k not in self._options}

    def _add(self, group: Any, option: Option) -> None:
        self._options[option.name] = option
        text = option.help.replace("%", "%%").replace("%%%%", "%%")
        if text != argparse.SUPPRESS:
            default = None if option.default is MISSING else option.default
            text += f" (default: {default})".replace("%", "%%")
        details: dict[str, Any] = {"help": text, "dest": option.name, "default": argparse.SUPPRESS}
        if is_sequence(option.annotation):
            details["nargs"] = "+"
        elif option.annotation is Any or is_flag(option.annotation):
            details |= {"nargs": "?", "const": True}
        if option.choices:
            details["metavar"] = f"{{{','.join(map(str, option.choices))}}}"
        group.add_argument(f"--{option.name}", **details)

    def _add_legacy(self, names: dict[str, Any]) -> None:
        """Old names take the type of what replaces them, or else what YAML makes of a value."""
        for old, new in names.items():
            if old not in self._options:
                annotation = self._options[new].annotation if new in self._options else Any
                self._legacy.add(old)
                self._add(self, Option(old, annotation, None, argparse.SUPPRESS))

    def _converted(self, option: Option, value: Any) -> Any:
        if option.annotation is Any and isinstance(value, str):
            with suppress(yaml.YAMLError):
                return yaml.safe_load(value)
        try:
            found = convert(value, option.annotation)
        except ConversionError as error:
            has_commas = is_sequence(option.annotation) and "," in str(value)
            hint = " Separate values by spaces." if has_commas and len(value) == 1 else ""
            raise ConversionError(f"--{option.name}: {error}.{hint}") from None
        for item in found if isinstance(found, list) else [found]:
            if option.choices and item is not None and item not in option.choices:
                legal = ", ".join(map(str, option.choices))
                raise ConversionError(f"--{option.name}: {item!r} is not one of {legal}.")
        return found


def required(names: Sequence[str]) -> str:
    """Say that options are required."""
    words = [f"--{name}" for name in names]
    if len(words) == 1:
        return f"{words[0]} is required."
    return f"{', '.join(words[:-1])} and {words[-1]} are required."


def _field_names(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(kind) if field.init}


def option_name(word: str) -> str:
    """The name in a word such as "--num-processes=2"."""
    return word.removeprefix("--").split("=")[0].replace("-", "_")


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Write options as command-line words."""
    words: list[str] = []
    for name, value in values.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        words += [f"--{name}", *map(str, items)]
    return words


@cache
def launch_option_names() -> frozenset[str]:
    """The options of `accelerate launch`, and `accelerate_config`, as its source lists them."""
    spec = importlib.util.find_spec("accelerate")
    source = Path(str(spec and spec.origin)).parent / "commands" / "launch.py"
    words = {
        word.value
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for word in node.args
        if isinstance(word, ast.Constant) and str(word.value).startswith("--")
    }
    return frozenset({"accelerate_config", "help", *(option_name(str(word)) for word in words)})
