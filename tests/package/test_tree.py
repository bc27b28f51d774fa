"""What a clean clone holds, and what its environments are made of."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from workspace import ROOT

FOLDERS = ("docs", "examples", "requirements", "scripts", "tests", "trl")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = [
    Requirement(line) for line in (ROOT / "requirements" / "constraints.txt").read_text().split()
]
PINNED = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in PINS}
ENVIRONMENTS = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *map(EXTRAS.get, ("test", "dev", "docs", "quickstart")))
    for text in texts
]


def test_git_ignores_nothing_that_belongs_to_the_project():
    """A rule that matches a folder of sources leaves it out of every clone."""
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert [name for name in done.stdout.splitlines() if "__pycache__" not in name] == []


def imported(path):
    """Names of the packages that a module imports when it runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    ]
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_dependencies_are_what_is_imported():
    found = {name for path in (ROOT / "trl").rglob("*.py") for name in imported(path)}
    provided = metadata.packages_distributions()
    others = found - set(sys.stdlib_module_names) - {"trl", "starlette"}  # it comes with vllm
    distributions = {canonicalize_name(provided[name][0]) for name in others}
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert distributions == declared - {"rich"}  # imported by name, through trl.imports


@pytest.mark.parametrize("requirement", ENVIRONMENTS, ids=str)
def test_environments_are_pinned_within_what_is_supported(requirement):
    version = PINNED[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_pins_are_exact_and_stand_once():
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in PINS)
    assert len(PINNED) == len(PINS)
