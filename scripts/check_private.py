"""Fail when a module uses a private name of another library that CONTRIBUTING.md does not list.

Private names start with one underscore and are not defined by the package. They are looked for in
attributes, imports, and arguments of `getattr` and similar functions. A private name of
`transformers.Trainer` that a subclass overrides looks like the package's own here;
tests/package/test_private_names.py finds those.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROW = re.compile(r"\| (`_[^|]*) \|[^|]*\| `([\w/]+\.py)` \|[^|]*\| ([^|]*) \|")
DOCUMENTED = {"_getframe", "_replace"}  # Python documents them under these names
# Functions that take names as text.
FUNCTIONS_OF_NAMES = {"getattr", "hasattr", "setattr", "delattr", "require", "import_module"}


def main(root: Path, table: Path) -> int:
    """Compare the private names used below `root` with the table; return the number of problems."""
    rows = ROW.findall(table.read_text(encoding="utf-8"))
    listed = {(file, name) for names, file, _ in rows for name in re.findall(r"`(\w+)`", names)}
    problems = []
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root.parent).as_posix()
        text = path.read_text(encoding="utf-8")
        for line, name in sorted(set(private_names(ast.parse(text)))):
            if (file, name) not in listed:
                problems.append(f"{path}:{line}: {name} is private: {table.name} does not list it")
        for _, name in sorted(row for row in listed if row[0] == file):
            if not re.search(rf"\b{name}\b", text):
                problems.append(f"{table}: {file} does not use {name}")
    for _, file, tests in rows:
        for listed_path in (file, *re.findall(r"`([\w/.]+)`", tests)):
            if not (root.parent / listed_path).exists():
                problems.append(f"{table}: there is no {listed_path}")
    for problem in problems:
        print(problem)
    print(f"check_private: {len(problems)} problems")
    return len(problems)


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each use of another library's private name."""
    own_names = _defined_names(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not _is_own(node) and node.attr not in own_names:
            names = [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            names = (getattr(node, "module", None) or "").split(".")
            names += [part for alias in node.names for part in alias.name.split(".")]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in FUNCTIONS_OF_NAMES
        ):
            values = [
                argument.value for argument in node.args if isinstance(argument, ast.Constant)
            ]
            names = [part for value in values for part in str(value).split(".")]
        for name in names:
            if is_private(name) and name not in DOCUMENTED | own_names:
                yield node.lineno, name


def _defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: classes, functions, variables, own attributes."""
    names = set()
    for node in ast.walk(tree):
        is_assigned = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and is_assigned and _is_own(node):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and is_assigned:
            names.add(node.id)
    return names


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def _is_own(node: ast.AST) -> bool:
    """Return whether an attribute is one of `self`, `cls` or `super()`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()")


if __name__ == "__main__":
    sys.exit(bool(main(Path("trl"), Path("CONTRIBUTING.md"))))
