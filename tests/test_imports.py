"""Optional dependencies."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import trl
from trl.imports import (
    CORE,
    EXTRAS,
    TESTED,
    check_versions,
    is_available,
    minimum_versions,
    outdated_version_error,
    require,
    untested_version_warning,
    version_of,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Distributions whose name differs from the module's, or that bring the module along.
BRINGS = {
    "latex2sympy2_extended": "math-verify",
    "liger_kernel": "liger-kernel",
    "math_verify": "math-verify",
}


def names(requirements):
    return {re.match(r"[\w-]+", text).group() for text in requirements}


@pytest.mark.parametrize("module", EXTRAS)
def test_every_extra_exists_and_brings_the_module(module):
    extras = PROJECT["optional-dependencies"]
    assert EXTRAS[module] in extras
    installed = names(extras[EXTRAS[module]]) | names(PROJECT["dependencies"])
    assert BRINGS.get(module, module) in installed


@pytest.mark.parametrize("module", EXTRAS)
def test_an_absent_module_names_extra_and_command(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as caught:
        require(module, "this feature")
    assert str(caught.value) == (
        f"this feature needs the package `{module}`, which is not installed. "
        f"Run: pip install 'trl[{EXTRAS[module]}]'"
    )


class WithoutRich:
    """A finder that says what Python says when rich is not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")


def test_a_submodule_of_an_absent_package_names_the_extra_too(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutRich, *sys.meta_path])
    with pytest.raises(ImportError, match=r"x needs the package `rich`.*'trl\[quickstart\]'"):
        require("rich.table", "x")


def test_a_broken_module_keeps_its_own_error(tmp_path, monkeypatch):
    """What is missing is not the package asked for, so its extra would not help."""
    (tmp_path / "peft_broken.py").write_text("import surely_absent_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_absent_module") as caught:
        require("peft_broken", "x")
    assert caught.value.name == "surely_absent_module"


def test_a_present_module_is_returned():
    assert require("json", "x") is importlib.import_module("json")


def test_availability_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_available("fails_on_import")
    assert "fails_on_import" not in sys.modules
    assert not is_available("surely_absent_module")


def pinned(file, package):
    text = (ROOT / "requirements" / file).read_text()
    return re.search(rf"^{package}==(\d+\.\d+)", text, re.MULTILINE).group(1)


@pytest.mark.parametrize("package", TESTED)
def test_what_is_said_to_be_tested_is_what_the_tests_install(package):
    assert TESTED[package] == (pinned("lowest.txt", package), pinned("constraints.txt", package))
    assert f"{package}>={TESTED[package][0]}" in PROJECT["dependencies"]


@pytest.mark.parametrize(
    ("installed", "warns"),
    [("5.16.0", False), ("5.23.4", False), ("5.24.0.dev0", True), ("5.100", True), ("6.0", True)],
)
def test_a_version_beyond_those_tested_is_named(monkeypatch, installed, warns):
    monkeypatch.setitem(TESTED, "transformers", ("5.16", "5.23"))
    monkeypatch.setattr("trl.imports.version", lambda package: installed)
    expected = (
        f"transformers {installed} is newer than the versions that trl was tested with (5.16 to "
        "5.23). If training fails or behaves oddly, run: pip install 'transformers==5.23.*'"
    )
    assert untested_version_warning("transformers") == (expected if warns else None)


# --- Versions that are too old ---


FLOORS = dict(line.split(">=") for line in PROJECT["dependencies"] if ">=" in line)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Let versions of packages stand before those that are installed: the folder they are in."""

    def install(**versions):
        needs = [*PROJECT["dependencies"], 'peft>=0.19; extra == "peft"']
        lines = "".join(f"Requires-Dist: {line}\n" for line in needs)
        for name, version in {"trl": "1", **versions}.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text + lines * (name == "trl"))
        return tmp_path

    for function in (minimum_versions, outdated_version_error):
        function.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for function in (minimum_versions, outdated_version_error):
        function.cache_clear()


def test_floors_are_those_of_the_project(installed):
    installed()
    assert minimum_versions() == FLOORS | {"peft": "0.19"}
    assert FLOORS.keys() == {*CORE}
    check_versions()


@pytest.mark.parametrize(
    ("package", "installed_version", "is_old"),
    [
        ("torch", "2.10.1+cu128", True),
        ("torch", "2.11.0a0+git1", False),
        ("torch", "3.0", False),
        ("transformers", "5.9.0", True),
        ("peft", "0.18.1", True),
        ("surely_absent", "1", False),
    ],
)
def test_a_version_below_the_floor_is_named_with_the_floor(
    installed, package, installed_version, is_old
):
    installed(**{package: installed_version})
    floor = minimum_versions().get(package)
    expected = (
        f"trl needs {package} {floor} or newer, but {installed_version} is installed. "
        f"Run: pip install '{package}>={floor}'"
    )
    assert outdated_version_error(package) == (expected if is_old else None)


def test_a_feature_whose_package_is_too_old_says_so(installed):
    installed(peft="0.18.1")
    with pytest.raises(ImportError, match=r"adapters: trl needs peft 0.19 or newer, but 0.18.1"):
        require("peft.tuners", "adapters")


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (["-c", "from trl import RLOOTrainer"], 1, "ImportError: "),
        (["-c", "import trl.trainer.sft_trainer"], 1, "ImportError: "),
        (["-m", "trl", "sft", "--model_name_or_path", "m"], 2, "trl sft: error: "),
    ],
)
def test_what_is_too_old_is_named_before_it_is_imported(installed, words, status, error):
    folder = installed(torch="2.8.0", transformers="5.1")
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    floor = FLOORS["torch"], FLOORS["transformers"]
    assert done.stderr.splitlines()[-1].startswith(
        f"{error}trl needs torch {floor[0]} or newer, but 2.8.0 is installed. "
        f"Run: pip install 'torch>={floor[0]}'; trl needs transformers {floor[1]} or newer, but 5.1"
    )


def test_without_an_installation_nothing_is_known_of_floors(installed, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert minimum_versions() == {} and outdated_version_error("torch") is None


def test_pythons_that_are_named_are_those_that_run_the_tests():
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow)[1]) == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    readme = (ROOT / "README.md").read_text()
    assert f"Python {named[0]} to {named[-1]}" in readme
    assert f"torch {FLOORS['torch']} to" in readme


def test_versions_of_what_is_not_installed():
    assert version_of("surely-absent-package") == "unknown"
    assert version_of("surely-absent-package", "") == ""
    assert version_of("torch") == metadata.version("torch")


# --- Names that are not there ---


def imported(name):
    with pytest.raises(ImportError) as error:
        exec(f"from trl import {name}", {})
    return str(error.value)


METHODS = {"Distillation", "ORPO", "CPO", "BCO"}
METHODS |= {"GKD", "XPO", "NashMD", "PRM", "IterativeSFT", "AlignProp"}
UPSTREAM = [f"{method}{kind}" for method in sorted(METHODS) for kind in ("Trainer", "Config")]
UPSTREAM += ["MergeModelCallback", "AutoModelForCausalLMWithValueHead", "HfPairwiseJudge", "extras"]


def test_names_of_upstream_say_that_they_are_not_there():
    trainers = ", ".join(name for name in trl.__all__ if name.endswith("Trainer"))
    end = f" It is not part of this release, whose trainers are {trainers}."
    for name in UPSTREAM:
        assert imported(name) == f"module 'trl' has no name {name!r}.{end}"
    with pytest.raises(AttributeError, match="'CPOConfig'. It is not part of this release"):
        trl.CPOConfig  # noqa: B018


def test_misspelled_names():
    assert imported("RLOTrainer").endswith("'RLOTrainer'. Did you mean RLOOTrainer?")
    assert imported("DPOConfg").endswith("'DPOConfg'. Did you mean DPOConfig?")


def test_programs_may_ask_for_names():
    assert [name for name in UPSTREAM if hasattr(trl, name) or name in trl.__all__] == []


def test_submodules_are_imported_as_before():
    code = "from trl import redaction, trainer; print(redaction.__name__, trainer.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["trl.redaction", "trl.trainer"], done.stderr
