"""Measured work: its description, how it runs in its environment, and the store of results."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import environments

ROOT = environments.ROOT
RESULTS = Path(os.environ.get("BENCH_RESULTS", ROOT / "docs" / "benchmarks"))
VOCABULARY = 151_936
GROUPS = {"OnlineDPO": 2, "PPO": 1}  # completions of a prompt, where they are not all of a step


@dataclass(frozen=True)
class Work:
    """A run of a trainer; lengths are in tokens."""

    trainer: str = field(default="this", metadata={"help": "this, or a peer such as trl-1.16.0"})
    algorithm: str = field(default="RLOO", metadata={"help": "RLOO, GRPO, OnlineDPO or PPO"})
    prompt: int = field(default=512, metadata={"help": "tokens of every prompt"})
    completion: int = field(default=53, metadata={"help": "tokens of every completion"})
    completions: int = field(default=2, metadata={"help": "completions of a prompt (k)"})
    vocabulary: int = field(default=VOCABULARY, metadata={"help": "entries of the vocabulary"})
    micro_batch: int = field(default=0, metadata={"help": "rows of a forward; 0: the whole group"})
    steps: int = field(default=1, metadata={"help": "optimizer steps"})
    shape: str = field(
        default="tiny", metadata={"help": "tiny, small, 0.5b, 1.5b or a kind of layers"}
    )
    beta: float = field(default=0.05, metadata={"help": "coefficient of the KL penalty"})
    prompts: str = field(
        default="tokens", metadata={"help": "tokens; strings or strings-1024 (trl-0.20.0 alone)"}
    )
    gpu_path: bool = field(
        default=False, metadata={"help": "trl-1.16.0 alone: hold what its kernels for GPUs hold"}
    )
    options: str = field(default="{}", metadata={"help": "more options of the trainer, as JSON"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    threads: int = field(default=1, metadata={"help": "threads of the CPU"})
    lora: bool = field(default=False, metadata={"help": "train an adapter of rank 16"})
    ragged: bool = field(default=False, metadata={"help": "prompts of half to all of the length"})
    level: bool = field(
        default=False,
        metadata={"help": "all rewards but two are the mean: no signal in their rows"},
    )
    timeline: bool = field(default=False, metadata={"help": "keep bytes over time"})
    explain: bool = field(default=False, metadata={"help": "name the largest blocks at the peak"})

    def identity(self) -> dict[str, Any]:
        """Return what identifies this work: all values that are not the default."""
        default = Work()
        changed_fields = {k: v for k, v in asdict(self).items() if v != getattr(default, k)}
        for key in ("timeline", "explain"):  # how closely it was watched
            changed_fields.pop(key, None)
        return {"trainer": self.trainer} | changed_fields

    def arguments(self) -> list[str]:
        """Return the command line for `work.py`."""
        arguments: list[str] = []
        for name, value in asdict(self).items():
            flag = f"--{name.replace('_', '-')}"
            if not isinstance(value, bool):
                arguments += [flag, str(value)]
            elif value:
                arguments.append(flag)
        return arguments


def parse_work(arguments: list[str], description: str | None) -> Work:
    """Read work from the command line."""
    parser = argparse.ArgumentParser(description=description)
    for part in fields(Work):
        flag = f"--{part.name.replace('_', '-')}"
        default = part.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=part.metadata["help"])
        else:
            text = f"{part.metadata['help']} (default {default})"
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return Work(**vars(parser.parse_args(arguments)))


def execute(
    work: Work, limit_gb: float = 0.0, timeout: float = 7200.0, trial: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run work in its own process and environment.

    Args:
        work (`Work`): what to run.
        limit_gb (`float`): most memory of the process in GB; 0: no limit.
        timeout (`float`): seconds after which it counts as failed.
        trial: what `shortage.py` does to the training.

    Returns:
        What `work.py` measured, or a dictionary with `error`.
    """
    command = [environments.interpreter(work.trainer), str(Path(__file__).with_name("work.py"))]
    command += work.arguments()
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    site = str(ROOT) if work.trainer == "this" else environments.site(work.trainer)
    paths = [site, os.environ.get("BENCH_SITE")]  # the latter: of packages that Python lacks
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    settings |= {"OMP_NUM_THREADS": str(work.threads), "TOKENIZERS_PARALLELISM": "false"}
    settings |= {"BENCH_LIMIT_GB": str(limit_gb), "BENCH_TRIAL": json.dumps(trial or {})}
    settings |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if work.device == "cuda":
        settings.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several, a trainer would use all
        settings.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums in every run
    try:
        process = subprocess.run(
            command, env=settings, capture_output=True, text=True, timeout=timeout, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {timeout:.0f} seconds"}
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"peak"')]
    if lines:
        return json.loads(lines[-1])
    return {
        "error": " | ".join(process.stderr.strip().splitlines()[-3:])
        or f"exit {process.returncode}"
    }


class Identified(Protocol):
    """A `Work`, or anything else that a row can identify."""

    def identity(self) -> dict[str, Any]:
        """Return what identifies it."""


class Store:
    """Measured rows in a JSON file. Each run is written as soon as it is finished.

    A run says on which machine and with which commit it was made. One without either was made on
    the machine at the head of the file.

    Args:
        path (`Path`): the file; made when the first row is added.
    """

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, with `setting`, `work`, and `runs` or `skipped`."""
        return self._read()["rows"]

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"machine": machine(), "rows": []}
        return json.loads(self.path.read_text(encoding="utf-8"))

    def find(self, setting: str, work: Identified) -> dict[str, Any] | None:
        """Return the row of a setting and work, if there is one."""
        key = (setting, work.identity())
        return next((r for r in self.rows() if (r["setting"], r["work"]) == key), None)

    def add(self, setting: str, work: Identified, run: dict[str, Any]) -> None:
        """Append a run to its row; a later success replaces an error or a skipped row."""
        with self._locked() as rows:
            row = next(
                (r for r in rows if (r["setting"], r["work"]) == (setting, work.identity())), None
            )
            if row is None:
                row = {"setting": setting, "work": work.identity(), "runs": []}
                rows.append(row)
            provenance = {"machine": machine(), "commit": commit()}
            row["runs"] = [r for r in row["runs"] if "peak" in r] + [run | provenance]

    def drop(self, settings: set[str]) -> None:
        """Remove all rows of some settings."""
        with self._locked() as rows:
            rows[:] = [row for row in rows if row["setting"] not in settings]

    @contextmanager
    def _locked(self) -> Iterator[list[dict[str, Any]]]:
        environments.BENCH.mkdir(exist_ok=True)
        with open(environments.BENCH / f"{self.path.stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._read()
            rows = content["rows"]
            yield rows
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(row) for row in rows)
            fresh = self.path.with_suffix(".new")
            machine_line = json.dumps(content.get("machine", machine()))
            fresh.write_text(
                f'{{"machine": {machine_line},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8"
            )
            fresh.replace(self.path)


def peak_of(row: dict[str, Any] | None) -> int | None:
    """Return the median of a row's peaks in bytes; None if it has none."""
    peaks = [run["peak"] for run in (row or {}).get("runs", []) if "peak" in run]
    return int(median(peaks)) if peaks else None


def spread_of(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the lowest and the highest value."""
    return median(values), min(values), max(values)


@cache
def commit() -> str:
    """Return the commit of this project, marked if the package or a benchmark was changed since."""
    paths = [str(ROOT / "trl"), str(Path(__file__).parent)]
    try:
        name, changes = (
            subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", *paths],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changes else name


@cache
def machine() -> dict[str, Any]:
    """Describe processor, cores and memory of this machine."""
    name = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = [x for x in cpu.read_text(encoding="utf-8").splitlines() if x[:10] == "model name"]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    system = f"{platform.system()} {platform.machine()}"
    python = ".".join(map(str, sys.version_info[:3]))
    description = {"cpu": name, "cores": os.cpu_count(), "memory_gb": round(pages / 1e9)}
    return description | {"system": system, "python": python}
