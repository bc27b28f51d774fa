"""One engine in one process: seconds to start, to take weights and to generate, as a line of JSON.

Engines are what the options of a trainer make, so nothing here knows how they work.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import synthetic
import torch
from datasets import Dataset

import trl
from trl.types import Prompts

ROWS = 32  # that an engine is made for
SYNCS = 2  # after the first
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"shared_prefix": False},
    "shared prompt": {"shared_prefix": True},
    "vLLM in the process": {"use_vllm": True},
    "vLLM server": {"use_vllm": True, "vllm_mode": "server"},
}


class Stopwatch:
    """Measures seconds, and processor seconds of this process and its children."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        own = psutil.Process()
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return time.perf_counter(), sum(
            process_times.user + process_times.system for process_times in times
        )

    def read(self) -> dict[str, float]:
        """Return the seconds since it was created."""
        wall, processor = self._now()
        return {"seconds": wall - self._start[0], "processor": processor - self._start[1]}


def main(work: dict[str, Any]) -> None:
    """Measure and print."""
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    context = work["prompt"] + work["completion"] + 32
    with tempfile.TemporaryDirectory() as output_folder:
        folder = synthetic.save(Path(output_folder), work["shape"], work["vocabulary"], context)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = synthetic.make_model(work["shape"], work["vocabulary"], context).to(dtype)
        model = model.cuda() if on_gpu else model
        used_bytes = [used_memory()]
        watch = Stopwatch()
        with server(work, folder, context) as options:
            trainer = make_trainer(model, work, options, output_folder)
            results: dict[str, Any] = {"start": watch.read()}
            used_bytes.append(used_memory())
            results |= measure(trainer, work, used_bytes)
    results["memory"] = used_bytes
    print(json.dumps(results), flush=True)


def used_memory() -> int:
    """Return the bytes of GPU memory in use; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def server(work: dict[str, Any], folder: Path, context: int) -> Iterator[dict[str, Any]]:
    """Yield the options of the engine; if it is a server, it runs inside the block."""
    options = ENGINES[work["engine"]]
    if "vllm_mode" not in options:
        yield options | ({"vllm_max_model_length": context} if "use_vllm" in options else {})
        return
    port = free_port()
    command = [sys.executable, "-m", "trl.cli.vllm_serve", "--model", str(folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max_model_len", str(context)]
    command += ["--dtype", "bfloat16" if torch.cuda.is_available() else "float32"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    address = {"vllm_server_base_url": f"http://127.0.0.1:{port}"}
    try:
        yield options | address
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def make_trainer(model: Any, work: dict[str, Any], options: dict[str, Any], folder: str) -> Any:
    """Make a trainer whose engine is measured. It never trains."""
    on_gpu = torch.cuda.is_available()
    if on_gpu and options.get("use_vllm") and "vllm_mode" not in options:
        options |= {"vllm_enable_sleep_mode": True}
    args = trl.RLOOConfig(
        folder,
        per_device_train_batch_size=ROWS,
        num_generations=8,
        max_completion_length=work["completion"],
        use_cpu=not on_gpu,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **({"vllm_probe_syncs": 0} if options.get("use_vllm") else {}),
        **options,
    )
    return trl.RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": texts(work, ROWS)}),
        processing_class=synthetic.make_tokenizer(work["vocabulary"]),
    )


def texts(work: dict[str, Any], count: int) -> list[str]:
    """Make prompts of equal length."""
    return synthetic.prompts(count, work["prompt"], work["vocabulary"])


def measure(trainer: Any, work: dict[str, Any], used_bytes: list[int]) -> dict[str, Any]:
    """Time syncs and generations; `held` is given the memory while the engine is awake."""
    backend = trainer.backend
    syncs = []
    for step in range(SYNCS + 1):
        with torch.no_grad():
            next(trainer.model.parameters()).mul_(1.0)  # so that weights count as moved
        watch = Stopwatch()
        backend.sync_weights(step)
        with backend.awake():
            syncs.append(watch.read())
            if step == SYNCS:
                used_bytes.append(used_memory())
                generations = generate(trainer, work)
    return {"syncs": syncs, "generations": generations}


def generate(trainer: Any, work: dict[str, Any]) -> dict[str, Any]:
    """Time one generation for each number of completions, after a short one to warm up."""
    prompts = [row["prompt"] for row in trainer.train_dataset]
    sampling = trainer.sampling.replace(stop_ids=())
    measurements = {}
    completion_counts = work["counts"]
    for index, (count, length) in enumerate(
        [(2, 2), *((n, work["completion"]) for n in completion_counts)]
    ):
        encoded = trainer.encode([{"prompt": prompts[index]}] * count)
        rows = Prompts(messages=encoded.messages, token_ids=encoded.token_ids)
        few = sampling.replace(seeds=tuple(range(count)), max_tokens=length)
        watch = Stopwatch()
        drawn = trainer.backend.generate(rows, few, count)
        measurements[str(count)] = watch.read()
        lengths = {len(ids) for ids in drawn.completion_ids}
        if lengths != {length}:
            raise RuntimeError(f"{work['engine']}: completions of {lengths} tokens, not {length}.")
    return {str(count): measurements[str(count)] for count in completion_counts}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    main(json.loads(sys.argv[1]))
