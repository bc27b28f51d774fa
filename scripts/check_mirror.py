"""Fail when a module has no test file, or a test file no module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

# Folders and files with tests of several modules, or of something other than a module.
OTHER_FOLDERS = (
    "adapters",
    "distributed",
    "docs",
    "examples",
    "invariance",
    "package",
    "vllm_cpu",
)
OTHER_FILES = (
    "cli/test_end_to_end.py",
    "ops/test_estimators.py",
    "ops/test_imports.py",
    "ops/test_properties.py",
    "scripts/test_training_scripts.py",
    "test_bad_inputs.py",
    "trainer/test_bema.py",
    "trainer/test_devices.py",
)


def main(package: Path, tests: Path) -> int:
    """Compare both trees; return the number of problems."""
    problems = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if has_code(path) and not test_of(relative, tests).exists():
            problems.append(f"{path}: no {test_of(relative, tests)}")
    for path in sorted(tests.rglob("test_*.py")):
        relative = path.relative_to(tests)
        module = package / relative.parent / relative.name.removeprefix("test_")
        elsewhere = relative.parts[0] in OTHER_FOLDERS or relative.as_posix() in OTHER_FILES
        if not elsewhere and not module.exists():
            problems.append(f"{path}: no {module}")
    for problem in problems:
        print(problem)
    print(f"check_mirror: {len(problems)} problems")
    return len(problems)


def test_of(relative: Path, tests: Path) -> Path:
    """Return the path of a module's tests."""
    return tests / relative.parent / f"test_{relative.name}"


def has_code(path: Path) -> bool:
    """Return whether a module defines a function or class, rather than only importing some."""
    if path.name in ("__init__.py", "__main__.py"):
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body)


if __name__ == "__main__":
    sys.exit(bool(main(Path("trl"), Path("tests"))))
