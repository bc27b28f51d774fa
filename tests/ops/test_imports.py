"""The mathematics runs where torch is the only package installed."""

import os
import subprocess
import sys
from pathlib import Path

import trl.ops

ROOT = Path(trl.ops.__file__).parents[2]
MODULES = sorted(
    f"trl.ops.{path.stem}" for path in (ROOT / "trl" / "ops").glob("*.py") if path.stem[0] != "_"
)


def test_every_module_imports_with_torch_alone():
    program = (
        "import importlib, sys\n"
        "blocked = 'transformers accelerate datasets peft tokenizers huggingface_hub'.split()\n"
        "sys.modules.update(dict.fromkeys(blocked))\n"
        f"for name in {MODULES}: importlib.import_module(name)\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] == 'trl'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # `trl.ops.torch_internals` itself imports nothing but torch, so `trl.ops` may use it.
    assert done.stdout.split() == sorted(["trl", "trl.ops", *MODULES])
