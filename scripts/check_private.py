"""Fail when a module uses a private name of another library that CONTRIBUTING.md does not list.

Private are attributes, imports and names given to `getattr` and its like that begin with one
underscore and are not the package's own. Names that subclasses of `transformers.Trainer` share with
it look like own ones here: tests/package/test_private_names.py compares those.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROW = re.compile(r"\| (`_[^|]*) \|[^|]*\| `([\w/]+\.py)` \|[^|]*\| ([^|]*) \|")
DOCUMENTED = {"_getframe", "_replace"}  # by Python, under these names
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "require", "import_module"}


def main(root: Path, table: Path) -> int:
    """Compare what modules below `root` use with the table; return the number of problems."""
    rows = ROW.findall(table.read_text(encoding="utf-8"))
    listed = {(file, name) for names, file, _ in rows for name in re.findall(r"`(\w+)`", names)}
    problems = []
    for path in sorted(root.rglob("*.py")):
        file, text = path.relative_to(root.parent).as_posix(), path.read_text(encoding="utf-8")
        for line, name in sorted(set(private_names(ast.parse(text)))):
            if (file, name) not in listed:
                problems.append(f"{path}:{line}: {name} is private: {table.name} does not list it")
        for _, name in sorted(row for row in listed if row[0] == file):
            if not re.search(rf"\b{name}\b", text):
                problems.append(f"{table}: {file} does not use {name}")
    for _, file, tested in rows:
        for named in (file, *re.findall(r"`([\w/.]+)`", tested)):
            if not (root.parent / named).exists():
                problems.append(f"{table}: there is no {named}")
    for problem in problems:
        print(problem)
    print(f"check_private: {len(problems)} problems")
    return len(problems)


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each use of what another library keeps private."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    stored = [x for x in ast.walk(tree) if isinstance(getattr(x, "ctx", None), ast.Store)]
    own |= {x.attr for x in stored if _is_own(x)} | {x.id for x in stored if hasattr(x, "id")}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and not _is_own(node) and node.attr not in own:
            names = [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            names = [*(getattr(node, "module", None) or "").split(".")]
            names += [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            values = [x.value for x in node.args if isinstance(x, ast.Constant)]
            names = [part for value in values for part in str(value).split(".")]
        for name in names:
            if is_private(name) and name not in DOCUMENTED | own:
                yield node.lineno, name


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def _is_own(node: ast.AST) -> bool:
    """Whether an attribute belongs to a class of the package: what is read off self, or super."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()")


if __name__ == "__main__":
    sys.exit(bool(main(Path("trl"), Path("CONTRIBUTING.md"))))
