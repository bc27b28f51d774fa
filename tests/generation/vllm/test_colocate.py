"""What needs no engine; tests/vllm_cpu runs a real one."""

import subprocess
import sys

from workspace import ROOT

from trl.generation.vllm.backend import BOUNDS
from trl.generation.vllm.colocate import VLLMColocateBackend

SCRIPT = """
import sys, trl.generation.vllm.colocate, trl.trainer.online.engines
from trl import RLOOConfig
RLOOConfig("x", use_cpu=True, bf16=False)
assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
"""


def test_nothing_of_vllm_is_imported_without_being_asked_for():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_log_probabilities_of_the_engine_do_not_replace_the_policys():
    assert not VLLMColocateBackend.reports_policy_logps


def test_bounds_widen_with_the_rounding_of_the_precision():
    import torch

    assert BOUNDS[torch.float32] < BOUNDS[torch.float16] < BOUNDS[torch.bfloat16]
