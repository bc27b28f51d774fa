"""Private names of vLLM, which are changed; tests/vllm_cpu runs engines on top of this."""

import ast
import gc
import importlib.util
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl.generation.vllm import internals
from trl.generation.vllm.internals import keep_process_groups, renamed_shared_memory

CORE = "v1/engine/core.py"
CLEAN_UP = "cleanup_dist_env_and_memory"
COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"


class Core:
    """What an engine is when it is shut down: it ends all process groups."""

    def __init__(self, module, calls):
        self.shutdown = lambda: calls.append("shut down") or getattr(module, CLEAN_UP)()


def test_an_engine_that_is_collected_leaves_process_groups(monkeypatch):
    calls = []
    module = SimpleNamespace(**{CLEAN_UP: lambda: calls.append("groups ended")})
    monkeypatch.setattr(internals, "require", lambda name, feature: module)
    core = Core(module, calls)
    client = type("Client", (), {"engine_core": core})()
    client._finalizer = weakref.finalize(client, core.shutdown)
    keep_process_groups(client, "a test")
    del client
    gc.collect()
    assert calls == ["shut down"]
    getattr(module, CLEAN_UP)()
    assert calls == ["shut down", "groups ended"], "it is back for others"


def test_what_ranks_share_is_renamed_inside_the_block_alone(monkeypatch):
    class Communicator:
        make_group_name = staticmethod(lambda group: f"name of {group}")

    modules = {COMMUNICATOR: SimpleNamespace(_CPUSHMDistributed=Communicator)}
    monkeypatch.setattr(internals, "require", lambda name, feature: modules[name])
    with renamed_shared_memory(lambda name: f"mine: {name}", "a test"):
        assert Communicator.make_group_name("a") == "mine: name of a"
    assert Communicator.make_group_name("a") == "name of a"


# --- vLLM itself, whose import takes long: its sources ---


def source(path):
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    return (Path(spec.origin).parent / path).read_text(encoding="utf-8")


def body(path, name):
    """The source of a class, function or method in a file of vLLM."""
    text = source(path)
    nodes = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == name]
    return "\n".join(ast.get_source_segment(text, node) for node in nodes)


def test_clients_of_engines_in_this_process_end_them_by_a_finalizer():
    client = body("v1/engine/core_client.py", "InprocClient")
    assert "self.engine_core = EngineCore(" in client
    assert "self._finalizer = weakref.finalize(self, self.engine_core.shutdown)" in client


def test_an_engine_that_is_shut_down_ends_process_groups_by_a_global_name():
    assert f"{CLEAN_UP}()" in source(CORE)
    assert CLEAN_UP in re.search(r"from vllm.distributed import \(([^)]*)", source(CORE))[1]


def test_ranks_on_a_cpu_find_what_they_share_by_a_name():
    communicator = body(f"{COMMUNICATOR.replace('.', '/')[5:]}.py", "_CPUSHMDistributed")
    assert "self.group_name = self.make_group_name(communicator)" in communicator
    assert "@staticmethod\n    def make_group_name(communicator" in communicator


def test_whether_weights_are_repacked_is_read_when_they_are_loaded():
    assert "_supports_onednn = " in source("_custom_ops.py")
    assert "ops._supports_onednn" in source("model_executor/layers/utils.py")
