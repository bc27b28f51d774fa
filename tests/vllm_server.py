"""Real vLLM servers on the CPU, started by `trl vllm-serve`."""

import os
import signal
import socket
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from forks import Program
from shared_vllm import model_policy, policy_model
from tiny import tiny_tokenizer
from workspace import ROOT, environment

from trl.generation.vllm.server.backend import Server, ServerPool, VLLMServerBackend

START = 500.0  # seconds: importing vLLM alone may take a minute on a machine that is busy
SECONDS = 60.0  # in which a server that runs must answer
CPU = torch.device("cpu")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class RunningServer:
    """A server whose workers can be made to fail; `faulty_worker.py` says how.

    Args:
        port: one that is free, if None.
        secret: whoever connects has it in the environment.
        forked (`bool`): start in a second, and not as `trl vllm-serve` itself does.
    """

    def __init__(self, port=None, secret="", forked=True):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp())
        words = ["vllm-serve", "--model", str(model_folder()), "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--dtype", "float32", "--max_model_len", "128"]
        words += ["--kv-cache-memory-bytes", str(16 * 2**20), "--disable-log-stats"]
        words += ["--distributed_executor_backend", "uni"]
        words += ["--worker-extension-cls", "vllm_cpu.faulty_worker.FaultyWorker"]
        variables = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TRL_VLLM_TOKEN": secret,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets a CPU do without a process for the worker
        }
        variables = environment(self.folder) | variables
        program = [ROOT / "tests" / "forked_workers.py"] if forked else ["-m", "trl"]
        self.process = Program([*program, *words], self.folder, variables, vllm=forked)

    def connect(self, seconds=SECONDS) -> Server:
        """Connect, once it has started."""
        try:
            Server(self.url, START)
        except ConnectionError as error:
            raise AssertionError(f"{error}\n{self.process.errors[-3000:]}") from error
        return Server(self.url, seconds)

    def kill(self):
        """End it as `kill -9` does, with all its processes."""
        self.process.kill()

    @contextmanager
    def stopped(self):
        """Let none of its processes run."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def fault(self, kind="", name="", first=1):
        """Let its workers do something wrong; without a kind, nothing."""
        self.connect().call_workers("trl_test_fault", kind, name, first)


@cache
def model_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    policy_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@cache
def shared_server() -> RunningServer:
    """One for all tests of a process."""
    return RunningServer(forked=False)


def connected_pool(*servers: RunningServer, seconds=SECONDS) -> ServerPool:
    """Servers whose workers take weights of this process."""
    found = ServerPool([server.connect(seconds) for server in servers or (shared_server(),)])
    found.join(CPU)
    return found


def server_backend(model, *, pool=None, **options) -> VLLMServerBackend:
    """A backend over the shared server, unless others are given."""
    servers = pool or connected_pool()
    return VLLMServerBackend(
        servers,
        model_policy(model),
        **({"probe_syncs": 1} | options),
    )
