"""Changes to vLLM itself where it has no options; checked with vLLM 0.26 to 0.33.

CONTRIBUTING.md lists the private names.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...imports import require


def keep_process_groups(client: Any, feature: str) -> None:
    """Keep all process groups when an engine, a vLLM `InprocClient`, is garbage-collected.

    vLLM's own finalizer would destroy those of training and of other engines, too.
    """
    finalizer = getattr(client, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
        weakref.finalize(client, _shut_down, client.engine_core, feature).atexit = False


def _shut_down(core: Any, feature: str) -> None:
    module: Any = require("vllm.v1.engine.core", feature)
    clean_up = module.cleanup_dist_env_and_memory
    module.cleanup_dist_env_and_memory = lambda: None
    try:
        core.shutdown()
    finally:
        module.cleanup_dist_env_and_memory = clean_up


@contextmanager
def renamed_shared_memory(rename: Callable[[str], str], feature: str) -> Iterator[None]:
    """Rename the shared memory of ranks on a CPU that is created inside the block."""
    module = "vllm.distributed.device_communicators.cpu_communicator"
    communicator: Any = require(module, feature)._CPUSHMDistributed
    make_name = communicator.make_group_name
    communicator.make_group_name = staticmethod(lambda group: rename(make_name(group)))
    try:
        yield
    finally:
        communicator.make_group_name = staticmethod(make_name)


def switch_off_repacking(feature: str) -> None:
    """On a CPU, keep weights as they were loaded: later loading does not update repacked copies."""
    operations: Any = require("vllm._custom_ops", feature)
    operations._supports_onednn = False
