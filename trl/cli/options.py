"""The options of a dataclass, and dataclasses made from sources that are not imported.

A source tells names, types, defaults and help without importing torch and transformers, which takes
longer than a user should wait for the news of a misspelled option.
"""

import argparse
import ast
import builtins
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Where a class is that its package exports from elsewhere.
HOMES = {"transformers.TrainingArguments": "transformers.training_args.TrainingArguments"}


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str  # with underscores
    annotation: Any
    default: Any  # `dataclasses.MISSING` if the option is required
    help: str
    choices: tuple[Any, ...] = ()  # empty if all values of the type are legal
    owner: type = object  # the class that declares it last
    is_foreign: bool = False  # that class is of another package than the one with the option


def options_of(kind: type) -> list[Option]:
    """Read a dataclass: its own options first, then those of its bases."""
    hints = typing.get_type_hints(kind)
    left = {field.name: field for field in dataclasses.fields(kind) if field.init}
    options = []
    for owner in kind.__mro__:
        is_foreign = _package(owner) != _package(kind)
        for name in filter(left.__contains__, inspect.get_annotations(owner)):
            field = left.pop(name)
            factory = field.default_factory
            default = factory() if callable(factory) else field.default
            text, choices = field.metadata.get("help", ""), field.metadata.get("choices")
            choices = tuple(choices) if isinstance(choices, Iterable) else ()
            options.append(Option(name, hints[name], default, text, choices, owner, is_foreign))
    return options


def class_from_source(path: str) -> type:
    """Make a dataclass with the options of the one at a path, which is not imported."""
    module, _, name = HOMES.get(path, path).rpartition(".")
    return _source(module)[name]


class _Computed(type):
    """What can be called and have attributes, without any effect."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __str__(cls) -> str:
        return "computed"


class Computed(metaclass=_Computed):
    """Stands for a default or a type that only an import would tell."""


class _Source(dict):
    """What the names in a module stand for, as far as its source tells."""

    def __init__(self, module: str):
        super().__init__()
        self.module = module
        file, self._package = _located(module)
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        self._classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        self._constants = _assigned(nodes)
        self._imported = {
            x.asname or x.name: f"{self._home(node)}.{x.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for x in node.names
        }

    def _home(self, node: ast.ImportFrom) -> str:
        above = self._package[: len(self._package) + 1 - node.level] if node.level else []
        return ".".join([*above, *filter(None, [node.module])])

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in self._constants

    def __missing__(self, name: str) -> Any:
        self[name] = self._found(name)
        return self[name]

    def _found(self, name: str) -> Any:
        for known in (typing, builtins, dataclasses):
            if hasattr(known, name):
                return getattr(known, name)
        if name in self._constants:
            return self._value(self._constants[name])
        if name in self._classes:
            return self._class(self._classes[name])
        path = self._imported.get(name, "")
        module, _, known_as = HOMES.get(path, path).rpartition(".")
        package = module.partition(".")[0]
        if package in ("trl", "transformers") and known_as in _source(module):
            return _source(module)[known_as]
        # Functions of this package alone are imported, to be called.
        return getattr(importlib.import_module(module), known_as) if package == "trl" else Computed

    def _value(self, expression: ast.expr) -> Any:
        with suppress(Exception):  # of what is done with values that only an import would tell
            return eval(compile(ast.Expression(expression), self.module, "eval"), {}, self)
        return Computed

    def _class(self, node: ast.ClassDef) -> type:
        """A dataclass with the same fields and old names, or an enumeration of the same values."""
        constants = _assigned(node.body)
        if any("Enum" in ast.unparse(base) for base in node.bases):
            names = {name: x.value for name, x in constants.items() if isinstance(x, ast.Constant)}
            return enum.Enum(node.name, names)  # type: ignore[misc,return-value]
        fields = [
            (ast.unparse(x.target), *map(self._value, filter(None, (x.annotation, x.value))))
            for x in node.body
            if isinstance(x, ast.AnnAssign)
        ]
        namespace: dict[str, Any] = {"__module__": self.module, "__doc__": ast.get_docstring(node)}
        if "legacy_options" in constants:
            namespace["legacy_options"] = self._value(constants["legacy_options"])
        bases = tuple(x for x in map(self._value, node.bases) if x is not Computed)
        return dataclasses.make_dataclass(
            node.name, fields, bases=bases, namespace=namespace, init=False, repr=False, eq=False
        )


_source = cache(_Source)


def _located(module: str) -> tuple[Path, list[str]]:
    """The file of a module, and the package it belongs to."""
    words = module.split(".")
    spec = importlib.util.find_spec(words[0])
    place = Path(str(spec and spec.origin)).parent.joinpath(*words[1:])
    if place.is_dir():
        return place / "__init__.py", words
    return place.with_suffix(".py"), words[:-1]


def _assigned(nodes: list[ast.stmt]) -> dict[str, ast.expr]:
    return {ast.unparse(x.targets[0]): x.value for x in nodes if isinstance(x, ast.Assign)}


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def option_groups(options: Iterable[Option]) -> list[tuple[str, list[Option]]]:
    """Title and options of each class that declares some; those of other packages come last."""
    unique: dict[str, Option] = {}
    for option in options:
        unique.setdefault(option.name, option)
    groups: dict[str, list[Option]] = {}
    for option in sorted(unique.values(), key=lambda option: option.is_foreign):
        groups.setdefault(title(option), []).append(option)
    return list(groups.items())


def title(option: Option) -> str:
    """What the options of a class are called: the first line that describes it."""
    owner, text = option.owner, inspect.getdoc(option.owner) or ""
    if option.is_foreign or text.startswith(f"{owner.__name__}("):  # as dataclasses describe it
        return f"options of {_package(owner)}.{owner.__name__}"
    return text.splitlines()[0].rstrip(".").replace("`", "")


def option_actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What a parser does with each option, by its words such as "--config"; Python 3.11 to 3.13."""
    return parser._option_string_actions


def short_help(parser: argparse.ArgumentParser, groups: Mapping[str, Iterable[str]]) -> str:
    """Help on some options, in sections with a title."""
    # Options come in the order in which they were added, and the first of a name is its own.
    named = {action.dest: action for action in reversed(option_actions(parser).values())}
    formatter = parser.formatter_class(prog=parser.prog)
    for name, options in groups.items():
        formatter.start_section(name)
        formatter.add_arguments([named[option] for option in options])
        formatter.end_section()
    return formatter.format_help()
