"""Parse dataclasses from the command line and YAML files, with the true type of every option."""

import argparse
import dataclasses
import difflib
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Any, NoReturn, Protocol

import yaml

from ..suggestions import commonly_meant
from .argv import option_name, required_options_error, to_argv
from .options import Option, option_actions, option_groups, options_of
from .values import ConversionError, convert, is_flag, is_sequence, read_config

INTERRUPTED = 128 + signal.SIGINT  # exit status of a process that Ctrl-C has ended
NEGATIVE_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-inf$")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        """Print one line and end the process with status 2."""
        text = re.sub(r"^argument (--[^/:]+)[^:]*:", r"\1:", message)
        self.exit(2, f"{self.prog}: error: {text}\n")

    @property
    def names(self) -> list[str]:
        """Names of all options, with underscores."""
        return [action.dest for action in self._actions if action.option_strings]

    @property
    def all_names(self) -> list[str]:
        """Names of all options, including the names that earlier releases used."""
        return self.names


class OptionGroup(Protocol):
    """A parser or a group of options in its help."""

    def add_argument(self, name: str, **details: Any) -> Any:
        """Add an option."""


@dataclass
class ParsedOptions:
    """The options that were given on the command line and in the file of `--config`."""

    values: dict[str, Any]  # the given options, converted to their types
    errors: list[str]  # one for each value that does not fit its option
    unknown_config: dict[str, Any]  # entries of the file that are not options
    unknown_argv: list[str]  # command-line arguments that belong to no option

    @property
    def unknown(self) -> list[str]:
        """What belongs to no option, as command-line arguments: from the file, then the others."""
        return [*to_argv(self.unknown_config), *self.unknown_argv]


class TrlParser(OneLineParser):
    """Parses dataclasses from the command line and from a YAML file given by `--config`.

    The command line has precedence over the file, and the file over the defaults. An `env` mapping
    in the file is put into the environment first. Errors are one line and name the closest options.

    Args:
        dataclass_types: one dataclass or several, without a field called `config`. Their attribute
            `legacy_options`, if there is one, maps old names of fields to new ones.
        commands_with: returns the commands that have an option, to name them in errors.
        **kwargs: arguments of `argparse.ArgumentParser`.

    ```python
    parser = TrlParser((ScriptArguments, RLOOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    ```
    """

    def __init__(
        self,
        dataclass_types: type | Iterable[type] = (),
        *,
        commands_with: Callable[[str], list[str]] | None = None,
        **kwargs: Any,
    ):
        self._commands_with = commands_with
        super().__init__(allow_abbrev=False, **({"usage": "%(prog)s [options]"} | kwargs))
        self._negative_number_matcher = NEGATIVE_NUMBER
        if isinstance(dataclass_types, type):
            dataclass_types = (dataclass_types,)
        self.dataclass_types = tuple(dataclass_types)
        self._options: dict[str, Option] = {}
        self._legacy_names: set[str] = set()
        self._defaults_from_config: dict[str, Any] = {}
        self._config_paths: dict[str, str] = {}  # for each unknown entry of a file, the file's path
        self.add_argument("--config", help="YAML file with options; the command line wins.")
        self._add_options_of_dataclasses()

    def _add_options_of_dataclasses(self) -> None:
        all_options = []
        for dataclass_type in self.dataclass_types:
            all_options += options_of(dataclass_type)
            if "config" in _init_fields(dataclass_type):
                raise ValueError(f"{dataclass_type.__name__} must not have a field called config.")
        for title, options in option_groups(all_options):
            group = self.add_argument_group(title)
            for option in options:
                self._add_option(group, option)
        for option in self._options.values():
            negation = f"no_{option.name}"
            if is_flag(option.annotation) and negation not in self._options:
                self.add_argument(
                    f"--{negation}",
                    dest=option.name,
                    action="store_false",
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )
        for dataclass_type in self.dataclass_types:
            self._add_legacy_options(getattr(dataclass_type, "legacy_options", {}))

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Build the dataclasses from the arguments, by default those of the process, and the file.

        A value that does not fit its option ends the process with status 2.

        Returns:
            The dataclasses, then a namespace of the options that `add_argument` added, if any, then
            the arguments that are not options, if `return_remaining_strings`: in one list, or
            those of the file and of the command line in separate lists.

        Raises:
            ValueError: there are unknown options; the error names them.
        """
        try:
            parsed = self.read(args)
        except ConversionError as error:
            self.error(str(error))
        if fail_with_unknown_args and not return_remaining_strings:
            self.check_unknown(parsed.unknown)
        result = self.build(parsed.values)
        other_values = {
            name: value for name, value in parsed.values.items() if name not in self._options
        }
        if other_values:
            result = (*result, argparse.Namespace(**other_values))
        if not return_remaining_strings:
            return result
        if separate_remaining_strings:
            return (*result, to_argv(parsed.unknown_config), parsed.unknown_argv)
        return (*result, parsed.unknown)

    def parse_args_into_dataclasses(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False
    ) -> tuple[Any, ...]:
        """Do the same as `parse_args_and_config`, under the name in `HfArgumentParser`."""
        return self.parse_args_and_config(args, return_remaining_strings)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Set defaults of options; return values of unknown options as command-line arguments."""
        return to_argv(self._take_defaults(values))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> Any:
        """Do the same as argparse, but accept hyphens in names of options, too."""
        argv = list(sys.argv[1:] if args is None else args)
        for index, argument in enumerate(argv):
            option = argument.partition("=")[0]
            is_unknown = option.startswith("--") and option not in option_actions(self)
            if is_unknown and self.knows(option_name(option)):
                argv[index] = f"--{option_name(option)}{argument.removeprefix(option)}"
        return super().parse_known_args(argv, namespace)

    def read(self, args: Sequence[str] | None = None) -> ParsedOptions:
        """Convert the given options to their types, without building the dataclasses.

        Raises:
            ConversionError: values do not fit their options; the error names all of them.
            ValueError, OSError: the file cannot be read; see `read_config`.
        """
        parsed = self.read_with_errors(args)
        if parsed.errors:
            raise ConversionError(" ".join(parsed.errors))
        return parsed

    def read_with_errors(self, args: Sequence[str] | None = None) -> ParsedOptions:
        """Do the same as `read`, but return the errors about values instead of raising one."""
        namespace, unknown_argv = self.parse_known_args(args)
        command_line_values = vars(namespace)
        path = command_line_values.pop("config", None)
        unknown_config = self._take_defaults(read_config(path) if path else {})
        self._config_paths = dict.fromkeys(unknown_config, str(path))
        values = self._defaults_from_config | command_line_values
        errors = []
        for name in values.keys() & self._options.keys():
            try:
                values[name] = self._convert(self._options[name], values[name])
            except ConversionError as error:
                errors.append(str(error))
        return ParsedOptions(values, sorted(errors), unknown_config, unknown_argv)

    def build(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Instantiate each dataclass with the values of its options."""
        missing = [
            name
            for dataclass_type in self.dataclass_types
            for name, field in _init_fields(dataclass_type).items()
            if name not in values and not _has_default(field)
        ]
        if missing:
            self.error(required_options_error(missing))
        instances = []
        for dataclass_type in self.dataclass_types:
            legacy_options = getattr(dataclass_type, "legacy_options", ())
            names = self._legacy_names.intersection(legacy_options)
            names = names.union(_init_fields(dataclass_type))
            own_values = {name: value for name, value in values.items() if name in names}
            instances.append(dataclass_type(**own_values))
        return tuple(instances)

    def check_unknown(self, argv: Sequence[str], other_names: Collection[str] = ()) -> None:
        """Raise a ValueError if there are arguments left over that belong to no option.

        Args:
            other_names: options of another program, which are allowed.
        """
        error_text = self.unknown_options_error(argv, other_names)
        if error_text:
            raise ValueError(error_text)

    def unknown_options_error(self, argv: Sequence[str], other_names: Collection[str] = ()) -> str:
        """Return the error that `check_unknown` would raise, or an empty string."""
        names = [option_name(argument) for argument in argv if argument.startswith("--")]
        unknown_names = [name for name in names if name not in other_names]
        if not unknown_names:
            return "" if other_names or not argv else f"unexpected words: {' '.join(argv)}."
        legal_names = [*self._options, *sorted(other_names)]
        hints_by_path: dict[str, list[str]] = {}  # the path is "" for the command line
        for name in unknown_names:
            path = self._config_paths.get(name, "")
            hint = self._name_with_hint(name, legal_names, dashes="" if path else "--")
            hints_by_path.setdefault(path, []).append(hint)
        errors = [_unknown_names_error(path, hints) for path, hints in hints_by_path.items()]
        return f"{'; '.join(errors)}."

    def _name_with_hint(self, name: str, legal_names: list[str], dashes: str) -> str:
        """Return an unknown name with the closest options and the commands that have it."""
        hints = []
        closest = difflib.get_close_matches(name, legal_names, n=3, cutoff=0.6)
        meant = commonly_meant(name, legal_names)
        if meant is not None:
            closest = [meant, *(other for other in closest if other != meant)][:3]
        if closest:
            hints.append(f"closest: {', '.join(dashes + other for other in closest)}")
        commands = [] if self._commands_with is None else self._commands_with(name)
        if commands:
            hints.append(f"an option of `trl {'`, `trl '.join(commands)}`")
        return f"{dashes}{name} ({'; '.join(hints)})" if hints else f"{dashes}{name}"

    @property
    def names(self) -> list[str]:
        """All options, without the names that earlier releases used."""
        return [name for name in self._options if name not in self._legacy_names]

    @property
    def all_names(self) -> list[str]:
        """All options, including the names that earlier releases used."""
        return list(self._options)

    def default(self, name: str) -> Any:
        """Return the default of an option."""
        return self._options[name].default

    def knows(self, name: str) -> bool:
        """Return whether there is an option `name` (with underscores, without hyphens)."""
        return f"--{name}" in option_actions(self)

    def _take_defaults(self, values: dict[str, Any]) -> dict[str, Any]:
        """Store values of known options as defaults, and return the others."""
        known = {name: value for name, value in values.items() if name in self._options}
        self._defaults_from_config |= known
        return {name: value for name, value in values.items() if name not in self._options}

    def _add_option(self, group: OptionGroup, option: Option) -> None:
        self._options[option.name] = option
        help_text = option.help.replace("%", "%%").replace("%%%%", "%%")
        if help_text != argparse.SUPPRESS:
            default = None if option.default is MISSING else option.default
            help_text += f" (default: {default})".replace("%", "%%")
        details: dict[str, Any] = {
            "help": help_text,
            "dest": option.name,
            "default": argparse.SUPPRESS,
        }
        if is_sequence(option.annotation):
            details["nargs"] = "+"
        elif option.annotation is Any or is_flag(option.annotation):
            details |= {"nargs": "?", "const": True}
        if option.choices:
            details["metavar"] = f"{{{','.join(map(str, option.choices))}}}"
        group.add_argument(f"--{option.name}", **details)

    def _add_legacy_options(self, new_names: Mapping[str, str]) -> None:
        """Add old names, with the type of the new option, or any YAML value if it was removed."""
        for old_name, new_name in new_names.items():
            if old_name not in self._options:
                is_renamed = new_name in self._options
                annotation = self._options[new_name].annotation if is_renamed else Any
                self._legacy_names.add(old_name)
                self._add_option(self, Option(old_name, annotation, None, argparse.SUPPRESS))

    def _convert(self, option: Option, value: Any) -> Any:
        """Convert a value to the type of its option, and check it against the choices."""
        if option.annotation is Any and isinstance(value, str):
            with suppress(yaml.YAMLError):
                return yaml.safe_load(value)
        try:
            converted = convert(value, option.annotation)
        except ConversionError as error:
            hint = _separator_hint(option, value)
            raise ConversionError(f"--{option.name}: {error}.{hint}") from None
        if option.choices:
            _check_choices(option, converted)
        return converted


def _unknown_names_error(path: str, hints: list[str]) -> str:
    """Return the error for unknown keys of a file, or unknown options if the path is empty."""
    subject = f"{path}: unknown key" if path else "unknown option"
    plural = "s" if len(hints) > 1 else ""
    return f"{subject}{plural} {', '.join(hints)}"


def _separator_hint(option: Option, value: Any) -> str:
    """Return advice for a list that was written with commas, such as `--reward_weights 1,2`."""
    has_commas = is_sequence(option.annotation) and "," in str(value)
    return " Separate values by spaces." if has_commas and len(value) == 1 else ""


def _check_choices(option: Option, value: object) -> None:
    """Raise a ConversionError if a value, or an entry of a list, is not one of the choices."""
    for entry in value if isinstance(value, list) else [value]:
        if entry is not None and entry not in option.choices:
            legal = ", ".join(map(str, option.choices))
            raise ConversionError(f"--{option.name}: {entry!r} is not one of {legal}.")


def _init_fields(dataclass_type: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(dataclass_type) if field.init}


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
