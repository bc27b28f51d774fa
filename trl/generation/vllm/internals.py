"""What this package changes inside vLLM, which has no options for it; seen in vLLM 0.26 to 0.33.

CONTRIBUTING.md lists the private names.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...imports import require


def keep_process_groups(client: Any, feature: str) -> None:
    """Let an engine that is collected leave the process groups of training and other engines."""
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
    """Give what ranks on a CPU share in memory other names, inside the block."""
    module = "vllm.distributed.device_communicators.cpu_communicator"
    communicator: Any = require(module, feature)._CPUSHMDistributed
    name_of = communicator.make_group_name
    communicator.make_group_name = staticmethod(lambda group: rename(name_of(group)))
    try:
        yield
    finally:
        communicator.make_group_name = staticmethod(name_of)


def switch_off_repacking(feature: str) -> None:
    """On a CPU, keep weights as they were loaded: later loading misses repacked copies."""
    operations: Any = require("vllm._custom_ops", feature)
    operations._supports_onednn = False
