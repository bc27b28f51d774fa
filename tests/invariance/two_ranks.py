"""Gradients and loss curves of two real processes: `two_ranks.py FILE`, with a rank's variables."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from trajectories import CLASSES, OPTIMIZERS, curve
from variants import Variant, measure

TWO = Variant(ranks=2)
VARIANTS = [
    TWO,
    TWO.but(shared=False, loss="dapo", junk=True),
    # Every group is half on one rank and half on the other.
    TWO.but(loss="rloo, KL", micro_batch=2, rounds=4, order=1),
    TWO.but(model="Qwen3", loss="grpo, KL", micro_batch=1, rounds=2, checkpointing=True),
    TWO.but(model="Llama, tied head", loss="dapo, entropy bonus", micro_batch=8, pad_is_eos=True),
    TWO.but(model="Gemma3, soft-capped logits", loss="rloo, second pass", micro_batch=2, logs=True),
    TWO.but(model="Phi, head bias", loss="gspo, second pass", shared=False, chunk=0),
]
# One rank has a micro-batch without signal.
EXACT = [TWO.but(single_zeros=False), TWO.but(single_zeros=False, shared=False)]
TRAJECTORIES = [name for name in CLASSES if CLASSES[name].ranks == 2]


class Job:
    """Both ranks, running beside what this process does."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self._ranks = [self._start(rank, port) for rank in range(2)]

    def _start(self, rank: int, port: int) -> subprocess.Popen:
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": 1,
        }
        return subprocess.Popen(
            [sys.executable, __file__, str(self._file)],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.DEVNULL,
            stderr=Path(self._folder.name, f"{rank}.txt").open("w"),
        )

    @property
    def _file(self) -> Path:
        return Path(self._folder.name, "found.pt")

    def result(self, timeout: float = 240) -> dict[Any, Any]:
        """Gradients of variants, and curves of (class, optimizer).

        Raises:
            RuntimeError: if a rank failed.
        """
        with self._folder:
            codes = [process.wait(timeout) for process in self._ranks]
            if any(codes):
                words = [Path(self._folder.name, f"{rank}.txt").read_text() for rank in range(2)]
                raise RuntimeError(
                    f"Ranks ended with {codes}: {words[0][-2000:]} {words[1][-2000:]}"
                )
            return torch.load(self._file, weights_only=False)

    def stop(self) -> None:
        """End what is still running."""
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def main(file: str) -> None:
    """What each rank does; the first one writes."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    exact = [variant.but(skip=skip) for variant in EXACT for skip in (True, False)]
    found: dict[Any, Any] = {v: measure(v).gradient for v in VARIANTS + exact}
    for name in TRAJECTORIES:
        for optimizer in OPTIMIZERS:
            found[name, optimizer] = curve(name, optimizer)
    if torch.distributed.get_rank() == 0:
        torch.save(found, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
