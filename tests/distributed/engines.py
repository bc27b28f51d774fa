"""Runs a script on several CPU processes under an engine: DDP, FSDP or DeepSpeed, over gloo.

In a test:

    from engines import Job, launch

    first, second = launch(SCRIPT, "zero3", folder)  # what each rank reported
    job = Job(SCRIPT, "fsdp2", folder, processes=2)  # the same, to end ranks or to look at them
    job.ranks[1].kill(); job.wait(60); job.words(0)

In the script, which imports what tests import (`online_runs`, `tiny`, `engines`):

    from engines import finish, report, use

    trainer = make_trainer(folder, use_cpu=False)  # the engine chooses the device
    report({"weights": ...})  # any value that `torch.save` takes; only the last one counts
    finish()

A script may go through several engines in one process: `use("zero2")` before each trainer.
`call(function, folder)` has each of two ranks call a function of the test.
`environment(engine)` are the variables that `accelerate launch` would set, with the choice of a CPU
engine.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forks import DEADLINE, Program

HERE = Path(__file__).parent
TESTS = HERE.parent
SHARDED = ("fsdp1", "fsdp2", "zero3")
ENGINES = ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}
_DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
}
_VARIABLES: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp1": _FSDP
    | {
        "FSDP_VERSION": "1",
        "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD",
        "FSDP_SYNC_MODULE_STATES": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
    },
    "fsdp2": _FSDP | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "zero1": _DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
    "zero2": _DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    # The small weights of tests are sharded too.
    "zero3": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(HERE / "cpu_engines" / "zero3.json"),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    },
}
_ALL = {name for variables in _VARIABLES.values() for name in variables}


# --- In tests ---


class Job:
    """A script on several processes, running until `wait`.

    Args:
        script: a file; it is given `arguments`.
        engine: one of `ENGINES`.
        processes: how many ranks.
        variables: more environment variables of all ranks.
        vllm: whether they have imported vLLM.
    """

    def __init__(
        self,
        script: str | Path,
        engine: str,
        *arguments: Any,
        processes: int = 2,
        variables: Mapping[str, Any] | None = None,
        vllm: bool = False,
    ):
        self._folder = tempfile.TemporaryDirectory()
        shared = environment(engine) | {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "ENGINE_REPORTS": self._folder.name,
            **ON_CPU,
        }
        shared |= {name: str(value) for name, value in (variables or {}).items()}
        kept = {name: value for name, value in os.environ.items() if name not in _ALL}
        command = [str(Path(script).resolve()), *map(str, arguments)]
        self.ranks = [
            Program(command, ".", kept | shared | {"RANK": rank, "LOCAL_RANK": rank}, vllm)
            for rank in map(str, range(processes))
        ]

    def words(self, rank: int) -> str:
        """What a rank printed, errors included."""
        return self.ranks[rank].output + self.ranks[rank].errors

    def reported(self, rank: int) -> Any:
        """What a rank reported last; None: nothing."""
        import torch

        file = Path(self._folder.name, f"{rank}.pt")
        return torch.load(file, weights_only=False) if file.exists() else None

    def wait(self, timeout: float = DEADLINE, until_one_fails: bool = False) -> list[int | None]:
        """Exit codes; the ranks that run when time is over are killed, and have None.

        Args:
            timeout: seconds.
            until_one_fails: do not wait for the others when a rank ended with an error.
        """
        deadline = time.monotonic() + timeout
        codes: list[int | None] = [None]
        while None in codes and time.monotonic() < deadline:
            codes = [rank.poll() for rank in self.ranks]
            if until_one_fails and any(codes):
                break
            time.sleep(0.02)
        self.stop()
        return codes

    def result(self, timeout: float = DEADLINE) -> list[Any]:
        """What each rank reported last.

        Raises:
            RuntimeError: with the last words of all ranks, if one failed or time is over.
        """
        codes = self.wait(timeout, until_one_fails=True)
        if any(code != 0 for code in codes):
            last = [f"--- rank {r}: {self.words(r)[-3000:]}" for r in range(len(codes))]
            raise RuntimeError(f"Ranks ended with {codes}.\n" + "\n".join(last))
        return [self.reported(rank) for rank in range(len(codes))]

    def stop(self) -> None:
        """Kill the ranks that still run."""
        for rank in self.ranks:
            rank.kill()


def launch(script: str | Path, engine: str, *arguments: Any, **options: Any) -> list[Any]:
    """Run a script to its end and return what each rank reported; options are those of `Job`.

    Args:
        timeout: seconds, `DEADLINE` if not given.

    Raises:
        RuntimeError: as `Job.result`.
    """
    timeout = options.pop("timeout", DEADLINE)
    return Job(script, engine, *arguments, **options).result(timeout)


def call(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[Any]:
    """What a function at the top of a test file returns on each rank.

    Args:
        arguments: arrive as strings.

    Raises:
        RuntimeError: as `Job.result`.
    """
    file = inspect.getfile(function)
    return launch(__file__, "ddp", file, function.__name__, *arguments, processes=processes)


def environment(engine: str) -> dict[str, str]:
    """The variables that choose an engine."""
    return dict(_VARIABLES[engine])


def python_path() -> str:
    """Where scripts find the patch, `trl` and the helpers of tests."""
    places = [HERE / "cpu_engines", HERE, TESTS.parent, TESTS, TESTS / "trainer"]
    return os.pathsep.join(map(str, places))


def _free_port() -> int:
    """Not one of those that the system gives to connections, of other tests perhaps, meanwhile."""
    while True:
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 30_000)))
            return int(found.getsockname()[1])


# Lets accelerate and DeepSpeed shard weights on a CPU.
ON_CPU = {"CPU_ENGINES": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
ON_CPU |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}


# --- In scripts ---


def use(engine: str) -> None:
    """Let the next trainer of this process run under an engine, whatever the last one did.

    Trainers and models of the last one must be gone.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in _ALL:
        os.environ.pop(name, None)
    os.environ.update(environment(engine))
    gc.collect()
    gc.freeze()  # what the last one made transformers import need not be looked through again


def report(value: Any) -> None:
    """Hand a value to the test."""
    import torch

    torch.save(value, Path(os.environ["ENGINE_REPORTS"], f"{os.environ['RANK']}.pt"))


def finish() -> None:
    """Leave together."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def gathered(values: Sequence[Any]) -> list[Any]:
    """The argument's values of all ranks, in rank order."""
    from accelerate.utils import gather_object

    return gather_object(list(values))


if __name__ == "__main__":  # of `call`
    file, name, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    report(getattr(importlib.import_module(Path(file).stem), name)(*arguments))
    finish()
