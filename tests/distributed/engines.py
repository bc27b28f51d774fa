"""Runs a script on several CPU processes under an engine: DDP, FSDP or DeepSpeed, over gloo.

In a test:

    from engines import Job, launch

    first, second = launch(SCRIPT, "zero3", folder, timeout=120)  # what each rank reported
    job = Job(SCRIPT, "fsdp2", folder, processes=2)  # the same, to end ranks or to look at them
    job.processes[1].kill(); job.wait(60); job.words(0)

In the script, which imports what tests import (`online`, `tiny`, `engines`):

    from engines import finish, report, use

    trainer = make_trainer(folder, use_cpu=False)  # the engine chooses the device
    report({"weights": ...})  # any value that `torch.save` takes; the last one counts
    finish()

A script may go through several engines in one process: `use("zero2")` before each trainer. The
processes are forked from one that has imported everything (`cpu_engines/preloaded.py`) and run the
script as its own program.
`environment(engine)` are the variables that `accelerate launch` would set, with the choice of a CPU
engine; `launcher(engine)` is a real `accelerate launch` command with a configuration file.
"""

from __future__ import annotations

import gc
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

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
    """

    def __init__(
        self,
        script: str | Path,
        engine: str,
        *arguments: Any,
        processes: int = 2,
        variables: Mapping[str, Any] | None = None,
    ):
        self._folder = tempfile.TemporaryDirectory()
        shared = environment(engine) | {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "ENGINE_REPORTS": self._folder.name,
            **_FORKING,
        }
        shared |= {name: str(value) for name, value in (variables or {}).items()}
        kept = {name: value for name, value in os.environ.items() if name not in _ALL}
        command = [str(script), *map(str, arguments)]
        context = _forking()
        self.processes = []
        for rank in range(processes):
            own = kept | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._file(rank, "txt").touch()
            given = (command, own, self._file(rank, "txt"))
            self.processes.append(context.Process(target=_begin, args=given, daemon=True))
            self.processes[-1].start()

    def _file(self, rank: int, kind: str) -> Path:
        return Path(self._folder.name, f"{rank}.{kind}")

    def words(self, rank: int) -> str:
        """What a rank printed, errors included."""
        return self._file(rank, "txt").read_text()

    def wait(self, timeout: float = 120, until_one_fails: bool = False) -> list[int | None]:
        """Exit codes; the ranks that run when time is over are killed, and have None.

        Args:
            timeout: seconds.
            until_one_fails: do not wait for the others when a rank ended with an error.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            codes = [process.exitcode for process in self.processes]
            if None not in codes or (until_one_fails and any(codes)):
                break
            time.sleep(0.02)
        codes = [process.exitcode for process in self.processes]
        self.stop()
        return codes

    def result(self, timeout: float = 120) -> list[Any]:
        """What each rank reported last.

        Raises:
            RuntimeError: with the last words of all ranks, if one failed or time is over.
        """
        import torch

        codes = self.wait(timeout, until_one_fails=True)
        if any(code != 0 for code in codes):
            last = [f"--- rank {r}: {self.words(r)[-3000:]}" for r in range(len(codes))]
            raise RuntimeError(f"Ranks ended with {codes}.\n" + "\n".join(last))
        files = [self._file(rank, "pt") for rank in range(len(codes))]
        return [torch.load(f, weights_only=False) if f.exists() else None for f in files]

    def stop(self) -> None:
        """Kill the ranks that still run."""
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()


def _forking() -> Any:
    """What forks processes from one that has imported what ranks need, and ends with this one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = {name: os.environ.get(name) for name in _FORKING}
    os.environ.update(_FORKING)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.update({name: value for name, value in before.items() if value is not None})
        for name in (name for name, value in before.items() if value is None):
            del os.environ[name]
    return context


def _begin(command: list[str], variables: dict[str, str], words: Path) -> None:
    """Be a rank: run a script as if it was started with these variables."""
    file = os.open(words, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = command
    sys.path[:0] = [str(Path(command[0]).parent), *python_path().split(os.pathsep)]
    runpy.run_path(command[0], run_name="__main__")


def launch(script: str | Path, engine: str, *arguments: Any, **options: Any) -> list[Any]:
    """Run a script to its end and return what each rank reported; options are those of `Job`.

    Args:
        timeout: seconds, 120 if not given.

    Raises:
        RuntimeError: as `Job.result`.
    """
    timeout = options.pop("timeout", 120)
    return Job(script, engine, *arguments, **options).result(timeout)


def environment(engine: str) -> dict[str, str]:
    """The variables that choose an engine."""
    return dict(_VARIABLES[engine])


def python_path() -> str:
    """Where scripts find the patch, `trl` and the helpers of tests."""
    places = [HERE / "cpu_engines", HERE, TESTS.parent, TESTS, TESTS / "trainer"]
    return os.pathsep.join(map(str, places))


def launcher(config: str | Path, processes: int = 2) -> tuple[list[str], dict[str, str]]:
    """Command and variables of a real `accelerate launch` on the CPU; append script and arguments.

    Args:
        config: a file like those in `trl/accelerate_configs`.
    """
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)),
        *("--num_processes", str(processes), "--mixed_precision", "no"),
        *("--main_process_port", str(_free_port())),
    ]
    variables = {"CPU_ENGINES": "1", "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    return command, {k: v for k, v in os.environ.items() if k not in _ALL} | variables


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# What the process that ranks are forked from needs at its start.
_FORKING = {"CPU_ENGINES": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
_FORKING |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}


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
