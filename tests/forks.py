"""Python programs that start at once, forked from a process that has imported what they need.

    done = Program(["script.py", "a"], folder, {"NAME": "value"}).wait()  # python script.py a
    done.status, done.output, done.errors

Libraries are imported under the variables of `_Nursery.__init__`; those of a program are what is
read later. `python tests/forks.py MODULE...` is the process that programs are forked from.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PATCH = TESTS / "distributed" / "cpu_engines"  # lets accelerate shard weights on a CPU
COMMON = (
    *("deepspeed", "peft", "bitsandbytes", "rounding", "online_runs", "trl.trainer.grpo_trainer"),
    *("accelerate.utils.fsdp_utils", "torch.distributed.checkpoint.state_dict", "torch._dynamo"),
    *("trl.cli.launch", "datasets.packaged_modules.json"),
)
VLLM = ("vllm.entrypoints.llm", "vllm.entrypoints.openai.api_server")


DEADLINE = 540.0  # seconds for any program: many times what one needs on a machine that is busy


class Program:
    """A program in a session of its own, and its exit status once it has ended.

    Args:
        words: what would follow `python`: a script, or `-m` and a module, and their arguments.
        folder: where it works.
        variables: its whole environment; `PYTHONPATH` counts too.
        vllm (`bool`): fork from a process that has imported vLLM as well.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        folder: str | Path,
        variables: Mapping[str, str],
        vllm: bool = False,
    ):
        self._nursery = _nursery((*COMMON, *VLLM) if vllm else COMMON)
        self._written = tempfile.TemporaryDirectory()
        self.status: int | None = None
        for stream in ("output", "errors"):  # it may be read before the program begins
            self._file(stream).touch()
        self.pid: int = self._nursery.ask(
            words=[*map(str, words)],
            folder=str(folder),
            variables=dict(variables),
            written=[str(self._file(stream)) for stream in ("output", "errors")],
        )

    def _file(self, stream: str) -> Path:
        return Path(self._written.name, stream)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._file("output").read_text()

    @property
    def errors(self) -> str:
        """What it has printed as errors."""
        return self._file("errors").read_text()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.status is None:
            self.status = self._nursery.ask(ended=self.pid)
        return self.status

    def wait(self, seconds: float = DEADLINE) -> "Program":
        """Let it end, and kill it if it has not after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        return self

    def kill(self) -> None:
        """End it with all processes of its session, if it runs."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.01)


@cache
def _nursery(modules: tuple[str, ...]) -> "_Nursery":
    return _Nursery(modules)


class _Nursery:
    """The process that programs are forked from; it ends, with them, when this one does."""

    def __init__(self, modules: tuple[str, ...]):
        self._home = tempfile.TemporaryDirectory()
        paths = (PATCH, TESTS.parent, TESTS)
        variables = os.environ | {
            "ACCELERATE_TORCH_DEVICE": "cpu",
            "CPU_ENGINES": "1",
            "DS_ACCELERATOR": "cpu",
            "HF_HOME": self._home.name,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TORCHDYNAMO_DISABLE": "1",  # as `trl vllm-serve` does
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        words = [sys.executable, __file__, *modules]
        self._process = subprocess.Popen(words, env=variables, cwd=self._home.name, **pipes)
        self._lock = threading.Lock()

    def ask(self, **request):
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        assert answer, "the process that programs are forked from has ended"
        return json.loads(answer)


# --- In the process that programs are forked from ---


def serve(modules: Sequence[str]) -> Sequence[str]:
    """Fork programs when asked to; returns in each of them, with its words."""
    for name in modules:
        with contextlib.suppress(ImportError):  # a test says what it misses itself
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise each program has all of this looked through
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    running = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            child, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if child else None
            running -= {child}
        else:
            answer = os.fork()
            if answer == 0:
                become(**request)
                return request["words"]
            running.add(answer)
        print(json.dumps(answer), file=answers, flush=True)
    for child in running:
        os.killpg(child, signal.SIGKILL)
    sys.exit()


def become(words, folder, variables, written) -> None:
    """Take over the place, the environment and the arguments of a program."""
    os.setsid()
    # A shell that starts the tests in the background has interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in written]
    for stream, file in enumerate(files):
        os.dup2(file, stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    first = folder if words[0] == "-m" else str(Path(words[0]).parent.resolve())
    sys.path[:] = [first, *variables.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    sys.argv[:] = words[1:] if words[0] == "-m" else words


def run(words: Sequence[str]) -> None:
    """Run a program as Python does."""
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(serve(sys.argv[1:]))
