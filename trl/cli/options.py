"""What the options of a dataclass are: taken from the class, or from its source.

A source tells names, types, defaults and help without importing torch and transformers, which takes
longer than a user should wait for the news of a misspelled option.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Where a class is that its package exports from elsewhere.
HOMES = {"transformers.TrainingArguments": "transformers.training_args.TrainingArguments"}


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Args:
        name (`str`): with underscores.
        annotation: its type.
        default: `dataclasses.MISSING` if the option is required.
        help (`str`): what it is for.
        choices: the values allowed; empty if all of the type are.
        owner (`str`): name of the class that declares it last.
        package (`str`): of that class.
    """

    name: str
    annotation: Any
    default: Any
    help: str
    choices: tuple[Any, ...]
    owner: str
    package: str


@dataclass(frozen=True)
class OptionClass:
    """A dataclass of options.

    Args:
        name, package (`str`): of the class.
        options (`list[Option]`): those of the class itself first, then those of its bases.
        legacy: old names that the class accepts -> the option that replaces each, if any.
    """

    name: str
    package: str
    options: list[Option]
    legacy: dict[str, str | None]


def options_of_class(kind: type) -> OptionClass:
    """Read a dataclass."""
    hints = typing.get_type_hints(kind)
    left = {field.name: field for field in dataclasses.fields(kind) if field.init}
    options = []
    for owner in kind.__mro__:
        package = owner.__module__.partition(".")[0]
        for name in filter(left.__contains__, inspect.get_annotations(owner)):
            field = left.pop(name)
            factory = field.default_factory
            default = factory() if callable(factory) else field.default
            text, choices = str(field.metadata.get("help", "")), field.metadata.get("choices", ())
            options.append(
                Option(name, hints[name], default, text, tuple(choices), owner.__name__, package)
            )
    package = kind.__module__.partition(".")[0]
    return OptionClass(kind.__name__, package, options, getattr(kind, "legacy_options", {}))


def options_of_source(path: str) -> OptionClass:
    """Read the source of a dataclass and of its bases.

    Args:
        path (`str`): such as "trl.trainer.rloo_config.RLOOConfig".
    """
    found: dict[str, Option] = {}
    legacy = None
    for module, node in _lineage(*_split(path)):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign):
                option = _option(module, node.name, statement)
                if option is not None:
                    found.setdefault(option.name, option)
            elif legacy is None and _assigns(statement, "legacy_options"):
                legacy = module.value(statement.value)
    package, *_, name = path.split(".")
    return OptionClass(name, package, list(found.values()), legacy or {})


class _Module(dict):
    """The source of a module, and as a mapping what a name in it stands for."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        file, self._package = _located(name)
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        self._constants = {
            ast.unparse(node.targets[0]): node.value
            for node in nodes
            if isinstance(node, ast.Assign)
        }
        self.imported = {
            x.asname or x.name: (self._home(node), x.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for x in node.names
        }

    def _home(self, node: ast.ImportFrom) -> str:
        """The module that a line imports from."""
        above = self._package[: len(self._package) + 1 - node.level] if node.level else []
        return ".".join([*above, *filter(None, [node.module])])

    def value(self, expression: ast.expr) -> Any:
        """Evaluate a type or a default, whose names stand for what sources tell."""
        return eval(compile(ast.Expression(expression), self.name, "eval"), {}, self)

    def value_or(self, expression: ast.expr, otherwise: Any) -> Any:
        """Evaluate what may be computed by functions that are not imported here."""
        with suppress(Exception):
            return self.value(expression)
        return otherwise

    def __missing__(self, name: str) -> Any:
        for built_in in (typing, builtins):
            if hasattr(built_in, name):
                return getattr(built_in, name)
        if name in self._constants:
            return self.value(self._constants[name])
        if name in self.classes:
            return _stand_in(self.classes[name])
        return self._elsewhere(*self.imported.get(name, ("", "")))

    def _elsewhere(self, module: str, name: str) -> Any:
        """An imported name; functions of this package alone are imported, to be called."""
        if module.partition(".")[0] not in ("trl", "transformers"):
            return Any
        other = _module(module)
        if name in other._constants or name in other.classes:
            return other[name]
        return getattr(importlib.import_module(module), name) if module[:4] == "trl." else Any


@cache
def _module(name: str) -> _Module:
    return _Module(name)


def _located(name: str) -> tuple[Path, list[str]]:
    """The file of a module, and the package it belongs to."""
    words = name.split(".")
    spec = importlib.util.find_spec(words[0])
    place = Path(str(spec and spec.origin)).parent.joinpath(*words[1:])
    if place.is_dir():
        return place / "__init__.py", words
    return place.with_suffix(".py"), words[:-1]


def _split(path: str) -> tuple[str, str]:
    module, _, name = HOMES.get(path, path).rpartition(".")
    return module, name


def _lineage(module: str, name: str) -> Iterator[tuple[_Module, ast.ClassDef]]:
    """The class and its bases, as far as they have sources here."""
    source = _module(module)
    node = source.classes[name]
    yield source, node
    for base in node.bases:
        inner = ast.unparse(base)
        if inner in source.classes:
            yield from _lineage(module, inner)
        elif inner in source.imported:
            yield from _lineage(*_split(".".join(source.imported[inner])))


def _assigns(statement: ast.stmt, name: str) -> typing.TypeGuard[ast.Assign]:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name


def _stand_in(node: ast.ClassDef) -> Any:
    """An enumeration with the same values; for another class, anything."""
    if not any("Enum" in ast.unparse(base) for base in node.bases):
        return Any
    members = [(ast.unparse(x.targets[0]), x.value) for x in node.body if isinstance(x, ast.Assign)]
    values = {name: x.value for name, x in members if isinstance(x, ast.Constant)}
    return enum.Enum(node.name, values)  # type: ignore[misc]


def _option(module: _Module, owner: str, node: ast.AnnAssign) -> Option | None:
    """What a line of a class declares; None for class variables and fields that no one sets."""
    if "ClassVar" in ast.unparse(node.annotation):
        return None
    annotation = module.value(node.annotation)
    name, package = ast.unparse(node.target), module.name.partition(".")[0]
    given = _arguments(node.value)
    if given.get("init") is not None and not module.value(given["init"]):
        return None
    value = MISSING
    if "default_factory" in given:
        value = module.value(given["default_factory"])()
    elif "default" in given:
        value = _default(module, given["default"])
    text, choices = (
        module.value_or(given[x], None) if x in given else None for x in ("help", "choices")
    )
    return Option(name, annotation, value, text or "", tuple(choices or ()), owner, package)


def _arguments(value: ast.expr | None) -> dict[str, ast.expr]:
    """The arguments of `field(...)` or `option(...)`, or a plain default."""
    if not isinstance(value, ast.Call):
        return {} if value is None else {"default": value}
    given = dict(zip(("default", "help", "choices"), value.args, strict=False))
    given |= {str(word.arg): word.value for word in value.keywords}
    metadata = given.pop("metadata", None)
    if isinstance(metadata, ast.Dict):
        given |= {
            str(key.value): x
            for key, x in zip(metadata.keys, metadata.values, strict=True)
            if isinstance(key, ast.Constant)
        }
    return given


def _default(module: _Module, expression: ast.expr) -> Any:
    """A default, or a word that says it is computed."""
    value = module.value_or(expression, Any)
    return "computed" if value is Any else value
