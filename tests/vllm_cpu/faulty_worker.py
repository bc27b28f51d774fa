"""Workers of a server that can be made to fail."""

import time
from pathlib import Path

import torch

from trl.generation.vllm.server import worker
from trl.generation.vllm.server.worker import WeightReceiver, WeightWorker

SLOW = 4.0  # seconds
PATIENCE = 60.0  # seconds after which a worker that hangs goes on, if nobody frees it


class FaultyReceiver(WeightReceiver):
    """Loads a weight in a wrong way, from the `first`-th time on since the fault was chosen."""

    fault, name, first, count = "", "", 1, 0
    old = {}

    def load(self, name, weight):
        kind = FaultyReceiver
        if name != kind.name:
            return super().load(name, weight)
        kind.count += 1
        if kind.count < kind.first:
            kind.old[name] = weight.clone()
        elif kind.fault == "skip":
            return None
        elif kind.fault == "stale":
            weight = kind.old[name]
        elif kind.fault == "transposed":
            weight = weight.T
        elif kind.fault == "refused":
            raise ValueError("no such place")
        elif kind.fault == "slow":
            time.sleep(SLOW)
        return super().load(name, weight)


worker.WeightReceiver = FaultyReceiver


class FaultyWorker(WeightWorker):
    """Takes orders of a test."""

    def trl_test_fault(self, kind, name, first):
        """Do something wrong with a weight; see `FaultyReceiver`."""
        FaultyReceiver.fault, FaultyReceiver.name, FaultyReceiver.first = kind, name, first
        FaultyReceiver.count, FaultyReceiver.old = 0, {}

    def trl_test_hang(self, file):
        """Let each step of the model wait as long as `file` is there, and say so in `file.seen`."""
        run = self.model_runner.execute_model

        def execute(*args, **kwargs):
            _hang(Path(file))
            return run(*args, **kwargs)

        self.model_runner.execute_model = execute

    def trl_test_pause(self, seconds):
        """Let each step of the model take longer."""
        run = getattr(self.model_runner, "own_execute", self.model_runner.execute_model)

        def execute(*args, **kwargs):
            time.sleep(seconds)
            return run(*args, **kwargs)

        self.model_runner.own_execute, self.model_runner.execute_model = run, execute

    def trl_test_zero(self):
        """Forget the weights, as a server that was started again."""
        self._trl_receiver.held_sync = None
        for parameter in self.get_model().parameters():
            torch.nn.init.zeros_(parameter)


def _hang(file):
    file.with_suffix(".seen").touch()
    end = time.monotonic() + PATIENCE
    while file.exists() and time.monotonic() < end:
        time.sleep(0.01)
