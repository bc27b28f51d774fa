"""What is built from the tree holds everything that is needed, and runs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from forks import DEADLINE
from workspace import ROOT, environment

PACKAGED = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "*.html", "*.jinja", "*.bib", "*.yaml", "py.typed", "*.pyi", "*.py")
    for path in (ROOT / "trl").rglob(pattern)
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.slow


def run(words, folder: Path, **variables) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=environment(folder) | variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with sdist and wheel, built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("trl", "tests", "examples", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    run([sys.executable, "-P", "-m", "build", "--no-isolation", "."], folder, PYTHONPATH="")
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A fresh environment with the wheel; the running one lends the packages that it needs."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", home], home.parent)
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install")
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    run(
        [*pip, *options, wheel], home.parent, PYTHONPATH=""
    )  # the checkout would count as installed
    (site,) = home.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def call(installed: Path, words: list) -> str:
    return run(words, installed.parent, PYTHONPATH="")


def test_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    information = f"trl-{PROJECT['version']}.dist-info"
    assert sorted(n for n in names if n.startswith("trl/")) == PACKAGED
    assert {n.split("/")[0] for n in names} == {"trl", information}
    assert f"{information}/licenses/LICENSE" in names
    assert wheel.name.endswith("-py3-none-any.whl")


def test_source_distribution_holds_the_package(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {*PACKAGED, "LICENSE", "README.md", "pyproject.toml"} <= names


def test_data_files_are_among_them():
    suffixes = {Path(name).suffix for name in PACKAGED}
    assert {".md", ".yaml", ".pyi", ".py"} <= suffixes
    assert "trl/py.typed" in PACKAGED


def test_metadata(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        text = file.read(f"trl-{PROJECT['version']}.dist-info/METADATA").decode()
    for name in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {name}\n" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    plain = [line for line in required if "extra ==" not in line]
    assert len(plain) == len(PROJECT["dependencies"])


def test_installed_package_is_imported(installed):
    code = "import trl; print(trl.__file__, trl.__version__)"
    file, version = call(installed, [installed / "bin" / "python", "-c", code]).split()
    assert Path(file).is_relative_to(installed)
    assert version == PROJECT["version"]


def test_installed_command(installed):
    command = installed / "bin" / "trl"
    assert os.access(command, os.X_OK)
    assert call(installed, [command, "--help"]).startswith("usage: trl COMMAND [options]")
    assert call(installed, [command, "--version"]) == f"{PROJECT['version']}\n"


def test_installed_environment_report(installed):
    output = call(installed, [installed / "bin" / "trl", "env"])
    assert f"- TRL version: {PROJECT['version']}\n" in output  # no checkout, so no commit


def test_installed_training_command(installed):
    output = call(installed, [installed / "bin" / "trl", "rloo", "--help"])
    assert output.startswith("usage: trl rloo ")
    assert "--num_generations" in output
