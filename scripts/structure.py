"""What the package is made of: modules, what they import, and chains of classes."""

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
OWNED_ABOVE = {"train_dataset", "eval_dataset"}  # of transformers.Trainer


# --- Imports ---


def imported(
    tree: ast.Module, relative: Path, inside_functions: bool = True
) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of every import, those for type checkers excepted.

    Args:
        relative: the module's path below the package.
        inside_functions: False leaves out what is imported when a function is called.
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
    """Yield line and text of each string that is a dotted name in the package, docstrings excepted.

    Such names are imported later, by `import_module` or `locate`: a class of "trl.trainer.x.Y".
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
    """For each module below `root`, by its dotted name, the modules that it imports.

    A name that is imported from a package counts as its own module where there is one. What a
    package's `__init__` is run for, on the way to a module in it, does not count.
    """
    names = {_dotted(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
    graph: Graph = {}
    for name, path in names.items():
        tree, relative = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root)
        targets = {module for _, module in imported(tree, relative, inside_functions)}
        targets |= {inner for _, inner in _names_of_packages(tree, relative, inside_functions)}
        if inside_functions:
            targets |= {_module_of(text, names) for _, text in named_modules(tree)}
        graph[name] = {target for target in targets if target in names} - {name}
    return graph


def _names_of_packages(
    tree: ast.Module, relative: Path, inside_functions: bool
) -> Iterator[tuple[str, str]]:
    package = ["trl", *relative.parts[:-1]]
    for node in _import_statements(tree, inside_functions):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield alias.name, ".".join([*base, node.module, alias.name])


def _module_of(name: str, modules: Collection[str]) -> str:
    """The module that a dotted name is in; the name itself if there is none."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 1, -1)]
    return next((prefix for prefix in prefixes if prefix in modules), name)


def _dotted(relative: Path) -> str:
    parts = ["trl", *relative.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others of the group."""
    reached = {name: _reached(graph, name) for name in graph}
    found = []
    for name in sorted(graph):
        group = sorted(other for other in reached[name] if name in reached[other])
        if group and group[0] == name:
            found.append(group)
    return found


def _reached(graph: Graph, start: str) -> set[str]:
    """All that a module imports, directly or not; itself if it is in a circle."""
    found, waiting = set(), [start]
    while waiting:
        for target in graph[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


@functools.cache
def modules_loaded(root: Path, name: str) -> list[str]:
    """Modules of the package that a fresh process has after `from PACKAGE import NAME`."""
    package = root.resolve().name
    code = (
        f"from {package} import {name}\nimport sys\n"
        f"print(*[m for m in sys.modules if (m + '.').startswith('{package}.')])"
    )
    command = [sys.executable, "-c", code]
    place = root.resolve().parent
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"from {package} import {name} failed: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1].split()


# --- Classes ---


@dataclass
class Class:
    """A class of the package, and what its methods set and read on `self`."""

    name: str
    module: str
    bases: list[str]
    lines: int
    is_data: bool
    sets: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)


def classes_of(root: Path) -> dict[str, Class]:
    """All classes at the top of modules, by name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = _class(node, _dotted(path.relative_to(root)))
    return found


def _class(node: ast.ClassDef, module: str) -> Class:
    made = Class(
        node.name,
        module,
        [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases],
        (node.end_lineno or node.lineno) - node.lineno + 1,
        any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list),
    )
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
            (made.reads if isinstance(inner.ctx, ast.Load) else made.sets).add(inner.attr)
    return made


def chain(classes: dict[str, Class], name: str) -> list[Class]:
    """A class and those of the package that it inherits from, nearest first."""
    found, waiting = [], [name]
    while waiting:
        current = classes.get(waiting.pop(0))
        if current is not None and current not in found:
            found.append(current)
            waiting += current.bases
    return found


def attributes_set_elsewhere(root: Path) -> list[str]:
    """Attributes that one class of a chain sets on `self` and another one reads.

    What the root of a chain sets is its subclasses' to read (above it may be protocols, which set
    nothing), and for trainers what classes of `trainer/base` set; so are the fields of dataclasses,
    and what `transformers.Trainer` owns.
    """
    classes = classes_of(root)
    readers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in classes:
        linked = chain(classes, name)
        for owner in linked:
            above_owner = chain(classes, owner.name)[1:]
            is_root = not any(c.sets for c in above_owner) or owner.module.startswith(BASE)
            for other in linked:
                if other is owner or owner.is_data:
                    continue
                above = owner in chain(classes, other.name)
                for attribute in owner.sets & (other.reads - other.sets) - OWNED_ABOVE:
                    if not (is_root and above):
                        readers[owner.name, attribute].add(other.name)
    return [
        f"{owner}.{attribute} in {', '.join(sorted(names))}"
        for (owner, attribute), names in sorted(readers.items())
    ]


def untyped_trainers(root: Path) -> list[str]:
    """Functions with a parameter `trainer` whose type is `Any`, or not given."""
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, FUNCTIONS):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in given:
                kind = ast.unparse(argument.annotation) if argument.annotation else "Any"
                if argument.arg.lstrip("_").endswith("trainer") and kind in ("Any", "object"):
                    found.append(f"{path}:{node.lineno} {node.name}")
    return found
