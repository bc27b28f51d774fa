"""Two processes that talk over gloo, in tests that spawn them."""

import os

from accelerate import Accelerator

from trl.distributed import Ranks


def join_two(rank: int, port: int) -> Ranks:
    """Meet the other process; both call this, with their rank and the same free port."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Ranks(Accelerator(cpu=True))
