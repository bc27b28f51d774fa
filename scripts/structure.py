"""Analyze the package's sources: modules and their imports, classes and their attributes."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME_IN_PACKAGE = re.compile(r"trl(\.\w+)+")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Graph = dict[str, set[str]]
BASE = "trl.trainer.base."
OWNED_BY_TRANSFORMERS = {"train_dataset", "eval_dataset"}  # attributes of its Trainer


# --- Imports ---


def imported(
    tree: ast.Module, relative: Path, inside_functions: bool = True
) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every import, except under `TYPE_CHECKING`.

    Args:
        relative: the module's path below the package.
        inside_functions: include imports that run when a function is called.
    """
    package = ["trl", *relative.parts[:-1]]
    for node in _import_statements(tree, inside_functions):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        name = ".".join([*base, *([node.module] if node.module else [])])
        if (node.level and not node.module) or name == "trl":
            for alias in node.names:
                yield node.lineno, f"{name}.{alias.name}"
        else:
            yield node.lineno, name


def named_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is a dotted name in the package, except docstrings.

    Such names are imported later by `import_module` or `locate`, for example "trl.trainer.x.Y".
    """
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    for node in constants:
        is_name = isinstance(node.value, str) and NAME_IN_PACKAGE.fullmatch(node.value)
        if is_name and id(node) not in docstrings:
            yield node.lineno, str(node.value)


def _import_statements(
    tree: ast.AST, inside_functions: bool
) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif inside_functions or not isinstance(node, FUNCTIONS):
            yield from _import_statements(node, inside_functions)


def import_graph(root: Path, inside_functions: bool = False) -> Graph:
    """Return, for each module below `root` by its dotted name, the modules that it imports.

    A module imported from its package, as in `from trl.cli import parser`, counts. The `__init__`
    of a package, which runs on the way to its modules, does not.
    """
    paths = {_dotted_name(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
    graph: Graph = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        relative = path.relative_to(root)
        targets = {module for _, module in imported(tree, relative, inside_functions)}
        targets |= set(_names_imported_from(tree, relative, inside_functions))
        if inside_functions:
            targets |= {_module_of(text, paths) for _, text in named_modules(tree)}
        graph[name] = {target for target in targets if target in paths} - {name}
    return graph


def _names_imported_from(tree: ast.Module, relative: Path, inside_functions: bool) -> Iterator[str]:
    """Yield the absolute dotted name of each name in `from ... import` statements."""
    package = ["trl", *relative.parts[:-1]]
    for node in _import_statements(tree, inside_functions):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield ".".join([*base, node.module, alias.name])


def _module_of(name: str, modules: Collection[str]) -> str:
    """Return the module that a dotted name is in; the name itself if there is none."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 1, -1)]
    return next((prefix for prefix in prefixes if prefix in modules), name)


def _dotted_name(relative: Path) -> str:
    parts = ["trl", *relative.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reachable = {name: _reachable(graph, name) for name in graph}
    groups = []
    for name in sorted(graph):
        group = sorted(other for other in reachable[name] if name in reachable[other])
        if group and group[0] == name:
            groups.append(group)
    return groups


def _reachable(graph: Graph, start: str) -> set[str]:
    """Return all modules that a module imports, directly or not; itself if it is in a circle."""
    reachable: set[str] = set()
    to_visit = [start]
    while to_visit:
        for target in graph[to_visit.pop()] - reachable:
            reachable.add(target)
            to_visit.append(target)
    return reachable


@functools.cache
def modules_loaded(root: Path, name: str) -> list[str]:
    """Return the package's modules that `from PACKAGE import NAME` loads in a new process."""
    package = root.resolve().name
    code = (
        f"from {package} import {name}\nimport sys\n"
        f"print(*[m for m in sys.modules if (m + '.').startswith('{package}.')])"
    )
    command = [sys.executable, "-c", code]
    folder = root.resolve().parent
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if result.returncode:
        raise RuntimeError(f"from {package} import {name} failed: {result.stderr[-2000:]}")
    return result.stdout.splitlines()[-1].split()


# --- Classes ---


@dataclass
class Class:
    """A class of the package, and the attributes that its methods set and read on `self`."""

    name: str
    module: str
    bases: list[str]
    lines: int
    is_dataclass: bool
    sets: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)


def classes_of(root: Path) -> dict[str, Class]:
    """Return all classes at the top level of modules, by name."""
    classes = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                module = _dotted_name(path.relative_to(root))
                classes[node.name] = _describe_class(node, module)
    return classes


def _describe_class(node: ast.ClassDef, module: str) -> Class:
    description = Class(
        name=node.name,
        module=module,
        bases=[ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases],
        lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        is_dataclass=any(
            "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
        ),
    )
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
            is_read = isinstance(inner.ctx, ast.Load)
            attributes = description.reads if is_read else description.sets
            attributes.add(inner.attr)
    return description


def chain(classes: dict[str, Class], name: str) -> list[Class]:
    """Return a class and the classes of the package that it inherits from, nearest first."""
    ancestors: list[Class] = []
    to_visit = [name]
    while to_visit:
        current = classes.get(to_visit.pop(0))
        if current is not None and current not in ancestors:
            ancestors.append(current)
            to_visit += current.bases
    return ancestors


def attributes_set_elsewhere(root: Path) -> list[str]:
    """Return attributes that one class of an inheritance chain sets on `self` and another reads.

    Subclasses may read what the root of the chain sets (protocols above it set nothing), what
    classes of `trainer/base` set, fields of dataclasses, and what `transformers.Trainer` owns.
    """
    classes = classes_of(root)
    readers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in classes:
        ancestors = chain(classes, name)
        for owner in ancestors:
            if owner.is_dataclass:
                continue
            above_owner = chain(classes, owner.name)[1:]
            owner_is_root = not any(ancestor.sets for ancestor in above_owner)
            may_be_read_below = owner_is_root or owner.module.startswith(BASE)
            for other in ancestors:
                if other is owner:
                    continue
                is_subclass = owner in chain(classes, other.name)
                if may_be_read_below and is_subclass:
                    continue
                shared = owner.sets & (other.reads - other.sets)
                for attribute in shared - OWNED_BY_TRANSFORMERS:
                    readers[owner.name, attribute].add(other.name)
    return [
        f"{owner}.{attribute} in {', '.join(sorted(names))}"
        for (owner, attribute), names in sorted(readers.items())
    ]


def untyped_trainers(root: Path) -> list[str]:
    """Return the functions with a parameter `trainer` without a type, or of type `Any`."""
    functions = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, FUNCTIONS):
                continue
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for parameter in parameters:
                is_trainer = parameter.arg.lstrip("_").endswith("trainer")
                annotation = ast.unparse(parameter.annotation) if parameter.annotation else "Any"
                if is_trainer and annotation in ("Any", "object"):
                    functions.append(f"{path}:{node.lineno} {node.name}")
    return functions
