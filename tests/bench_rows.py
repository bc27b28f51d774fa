"""What tests of the benchmark programs share."""

import importlib
import shutil
import sys

import pytest
from workspace import ROOT

BENCH = ROOT / "scripts" / "bench"
COUNTING = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux and a C compiler"
)


@pytest.fixture(name="load")
def loader(monkeypatch):
    """Import a module of scripts/bench; none of them stays behind under its short name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    own = {path.stem for path in BENCH.glob("*.py")}
    for name in own & (set(sys.modules) - before):
        del sys.modules[name]


def run(*peaks, **more):
    return [{"peak": peak, "seconds": {}, "steps": []} | more for peak in peaks]


def row(setting, runs, **work):
    return {"setting": setting, "work": {"trainer": "this"} | work, "runs": runs}
