"""Read the options of dataclasses, also from source files that are not imported.

A source file gives names, types, defaults and help of options without importing torch and
transformers. Importing them takes seconds, too long for an error about a misspelled option.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# For a class that its package exports from another module, the path in that module.
DEFINING_MODULES = {
    "transformers.TrainingArguments": "transformers.training_args.TrainingArguments"
}


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str  # with underscores
    annotation: Any
    default: Any  # `dataclasses.MISSING` if the option is required
    help: str
    choices: tuple[Any, ...] = ()  # empty if all values of the type are legal
    owner: type = object  # the last class that declares the option
    is_foreign: bool = False  # whether `owner` is from another package than the dataclass


def options_of(dataclass_type: type) -> list[Option]:
    """Return the options of a dataclass: first its own, then those of its bases."""
    hints = typing.get_type_hints(dataclass_type)
    remaining = {field.name: field for field in dataclasses.fields(dataclass_type) if field.init}
    options = []
    for owner in dataclass_type.__mro__:
        for name in inspect.get_annotations(owner):
            if name not in remaining:
                continue
            field = remaining.pop(name)
            factory = field.default_factory
            choices = field.metadata.get("choices")
            option = Option(
                name=name,
                annotation=hints[name],
                default=factory() if callable(factory) else field.default,
                help=field.metadata.get("help", ""),
                choices=tuple(choices) if isinstance(choices, Iterable) else (),
                owner=owner,
                is_foreign=_package_of(owner) != _package_of(dataclass_type),
            )
            options.append(option)
    return options


def class_from_source(path: str) -> type:
    """Make a dataclass with the same options as the one at a path, without importing it."""
    module, _, name = DEFINING_MODULES.get(path, path).rpartition(".")
    return _names_of_module(module)[name]


class _UnknownValueType(type):
    """Type of `UnknownValue`, which can be called and has every attribute."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __str__(cls) -> str:
        return "computed"


class UnknownValue(metaclass=_UnknownValueType):
    """Placeholder for a default or a type that is known only after an import.

    Calling it or reading an attribute returns the placeholder again. Help shows it as "computed".
    """


class _ModuleNames(dict[str, Any]):
    """The values of the names in a module, as far as its source shows them.

    Values are computed when they are first looked up. It serves as the namespace in which
    expressions of the module are evaluated.
    """

    def __init__(self, module: str):
        super().__init__()
        self.module = module
        file, self._package = _locate_module(module)
        statements = ast.parse(file.read_text(encoding="utf-8")).body
        self._classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
        self._constants = _assigned_names(statements)
        # For each imported name, the path of what it refers to.
        self._imported_paths = {
            alias.asname or alias.name: f"{self._imported_module(node)}.{alias.name}"
            for node in statements
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def _imported_module(self, node: ast.ImportFrom) -> str:
        parents: list[str] = []
        if node.level:
            parents = self._package[: len(self._package) + 1 - node.level]
        return ".".join([*parents, *filter(None, [node.module])])

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in self._constants

    def __missing__(self, name: str) -> Any:
        self[name] = self._look_up(name)
        return self[name]

    def _look_up(self, name: str) -> Any:
        for standard_module in (typing, builtins, dataclasses):
            if hasattr(standard_module, name):
                return getattr(standard_module, name)
        if name in self._constants:
            return self._evaluate(self._constants[name])
        if name in self._classes:
            return self._make_class(self._classes[name])
        path = self._imported_paths.get(name, "")
        module, _, name_there = DEFINING_MODULES.get(path, path).rpartition(".")
        package = module.partition(".")[0]
        if package in ("trl", "transformers") and name_there in _names_of_module(module):
            return _names_of_module(module)[name_there]
        if package == "trl":  # functions of this package that are called to compute a value
            return getattr(importlib.import_module(module), name_there)
        return UnknownValue

    def _evaluate(self, expression: ast.expr) -> Any:
        with suppress(Exception):  # an operation on an `UnknownValue` may raise any error
            return eval(compile(ast.Expression(expression), self.module, "eval"), {}, self)
        return UnknownValue

    def _make_class(self, node: ast.ClassDef) -> type:
        """Make a dataclass with the same fields and legacy options, or an equal enumeration."""
        constants = _assigned_names(node.body)
        if any("Enum" in ast.unparse(base) for base in node.bases):
            members = {
                name: expression.value
                for name, expression in constants.items()
                if isinstance(expression, ast.Constant)
            }
            return enum.Enum(node.name, members)  # type: ignore[misc,return-value]
        fields = [
            self._make_field(statement)
            for statement in node.body
            if isinstance(statement, ast.AnnAssign)
        ]
        namespace: dict[str, Any] = {"__module__": self.module, "__doc__": ast.get_docstring(node)}
        if "legacy_options" in constants:
            legacy_options = self._evaluate(constants["legacy_options"])
            if isinstance(legacy_options, dict):  # not where a package that they need is too old
                namespace["legacy_options"] = legacy_options
        bases = [self._evaluate(base) for base in node.bases]
        return dataclasses.make_dataclass(
            node.name,
            fields,
            bases=tuple(base for base in bases if base is not UnknownValue),
            namespace=namespace,
            init=False,
            repr=False,
            eq=False,
        )

    def _make_field(self, statement: ast.AnnAssign) -> Any:
        """Return name, type and default of a field, as `make_dataclass` takes them."""
        name = ast.unparse(statement.target)
        annotation = self._evaluate(statement.annotation)
        if statement.value is None:
            return name, annotation
        return name, annotation, self._evaluate(statement.value)


_names_of_module = cache(_ModuleNames)


def _locate_module(module: str) -> tuple[Path, list[str]]:
    """Return the file of a module, and the names of the packages that contain it."""
    names = module.split(".")
    spec = importlib.util.find_spec(names[0])
    path = Path(str(spec and spec.origin)).parent.joinpath(*names[1:])
    if path.is_dir():
        return path / "__init__.py", names
    return path.with_suffix(".py"), names[:-1]


def _assigned_names(statements: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the expression assigned to each name."""
    return {
        ast.unparse(statement.targets[0]): statement.value
        for statement in statements
        if isinstance(statement, ast.Assign)
    }


def _package_of(class_: type) -> str:
    return class_.__module__.partition(".")[0]


def option_groups(options: Iterable[Option]) -> list[tuple[str, list[Option]]]:
    """Group options by the class that declares them, with a title; other packages come last."""
    unique: dict[str, Option] = {}
    for option in options:
        unique.setdefault(option.name, option)
    groups: dict[str, list[Option]] = {}
    for option in sorted(unique.values(), key=lambda option: option.is_foreign):
        groups.setdefault(group_title(option), []).append(option)
    return list(groups.items())


def group_title(option: Option) -> str:
    """Return the title of the group of an option: the first line of its class's docstring."""
    owner = option.owner
    docstring = inspect.getdoc(owner) or ""
    is_generated = docstring.startswith(f"{owner.__name__}(")  # by `dataclass`
    if option.is_foreign or is_generated:
        return f"options of {_package_of(owner)}.{owner.__name__}"
    return docstring.splitlines()[0].rstrip(".").replace("`", "")


def option_actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the actions of a parser by option string, such as "--config"; Python 3.11 to 3.13."""
    return parser._option_string_actions


def short_help(parser: argparse.ArgumentParser, sections: Mapping[str, Iterable[str]]) -> str:
    """Format the help of some options.

    Args:
        sections: for each title, the names of its options.
    """
    # Reversed, so that --no_x, which was added after --x for the same name, does not replace it.
    actions = {action.dest: action for action in reversed(option_actions(parser).values())}
    formatter = parser.formatter_class(prog=parser.prog)
    for title, names in sections.items():
        formatter.start_section(title)
        formatter.add_arguments([actions[name] for name in names])
        formatter.end_section()
    return formatter.format_help()
