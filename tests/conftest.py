"""Fixtures of all tests."""

import gc
import os
import socket
import sys
from pathlib import Path

import pytest
import rounding  # noqa: F401  # changes how products round, if it is told to
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def log(caplog):
    """What the loggers of transformers, and so those of the package, write."""
    from transformers.utils import logging

    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


# Those that start processes.
FOLDERS = ("vllm_cpu", "distributed", "invariance", "docs", "adapters", "examples", "package")
LONG = (*FOLDERS, "cli", "trainer")  # begun first, so that two workers end at the same time


def _folder(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: (*LONG, _folder(item.path)).index(_folder(item.path)))
    if config.getoption("--fast"):
        _leave_out(config, items)


def pytest_collection_finish():
    """Each training run ends with `gc.collect`, which need not look at what was imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file is run by one worker; so are all tests of vLLM, which share an engine and a server."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "vllm_cpu" if "/vllm_cpu/" in file else file

    return ByFile(config, log)


# --- `make test-fast` ---

MARKED = ("gpu", "vllm", "distributed", "slow")


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="no engine and no second process")


def pytest_configure(config):
    if config.getoption("--fast"):
        sys.addaudithook(_skip_what_starts_a_process)


def _skip_what_starts_a_process(event, arguments):
    """Called by Python itself, so that no test must be marked for it and none is forgotten."""
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ:
        program = Path(os.fsdecode(arguments[0])).name
        if program not in ("git", "uname"):  # they take milliseconds
            pytest.skip(f"starts {program}")


def pytest_ignore_collect(collection_path, config):
    """Some of these modules cannot be imported without vLLM."""
    if config.getoption("--fast") and collection_path != Path(__file__).parent:
        return True if _folder(collection_path) in FOLDERS else None
    return None


def _leave_out(config, items):
    """What is marked, and of each test of whole runs all but one set of parameters."""
    left_out, seen = [], set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        is_again = _folder(item.path) in ("trainer", "memory") and function in seen
        if is_again or any(item.get_closest_marker(name) for name in MARKED):
            left_out.append(item)
        seen.add(function)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture
def process_group(tmp_path):
    """This process alone, as torch's default group."""
    if torch.distributed.is_initialized():  # by a test before, in the same process
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
