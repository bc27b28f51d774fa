"""Lets accelerate run its engines on CPU processes over gloo; loaded at start-up by `engines.py`.

Accelerate shards weights on accelerator devices only. Nothing here touches `trl` or any maths.
"""

import importlib.abc
import importlib.util
import os
import sys


def _is_on(name):
    return os.environ.get(name, "false").lower() == "true"


def _choose_backend(self, cpu=False, sagemaker_dp=False, backend=None):
    """Replaces the choice by device: gloo, and the kind of engine that the variables name."""
    from accelerate.utils import DistributedType

    if int(os.environ.get("LOCAL_RANK", -1)) == -1:
        return None, DistributedType.NO
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        import deepspeed

        # Otherwise a communication kernel is compiled for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        return "gloo", DistributedType.NO
    if _is_on("ACCELERATE_USE_FSDP"):
        _leave_full_states_where_they_are()
        return "gloo", DistributedType.MULTI_GPU
    return "gloo", DistributedType.MULTI_CPU


def _leave_full_states_where_they_are():
    """Offloading tensors that are on the CPU already would read freed memory."""
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

    def assign(self, name, value):
        object.__setattr__(self, name, value and name != "offload_to_cpu")

    FullStateDictConfig.__setattr__ = FullOptimStateDictConfig.__setattr__ = assign


class _Patch(importlib.abc.MetaPathFinder):
    """Changes `accelerate.state` right after its import."""

    busy = False

    def find_spec(self, name, path, target=None):
        if name != "accelerate.state" or self.busy:
            return None
        self.busy = True
        spec = importlib.util.find_spec(name)
        self.busy = False
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.PartialState._prepare_backend = _choose_backend

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("CPU_ENGINES"):
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.meta_path.insert(0, _Patch())
