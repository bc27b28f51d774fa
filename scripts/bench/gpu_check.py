"""The first minutes on a GPU: what works there, what is equal, and what it holds.

Runs with the Python that starts it: nothing is installed or fetched. Each part is a process of its
own with a deadline, the most telling first. Results are added to gpu.json as they come, so a run
that is cut short leaves what it had; what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runs import RESULTS, ROOT, Store

HERE = Path(__file__).parent
NEEDED = ("torch", "transformers", "accelerate", "datasets")  # at least as pyproject.toml says
USED = (
    "pytest",
    "peft",
    "rich",
    "matplotlib",
    "vllm",
)  # without these, a part says less or is left out


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Args:
        name (`str`): of the part, and of its row in gpu.json.
        what (`str`): what it shows.
        seconds (`float`): its deadline.
        command (`tuple[str, ...]`): what is run; each line of JSON that it prints is a result.
        needs (`str`, *optional*): the package without which it is left out.
    """

    name: str
    what: str
    seconds: float
    command: tuple[str, ...]
    needs: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return what identifies its row."""
        return {"part": self.name}


def parts(device: str, tiny: bool) -> Iterator[Part]:
    """Return all parts, the most informative first."""
    flags = ("--device", device, *(["--tiny"] if tiny else []))

    def own(name: str, title: str, seconds: float) -> Part:
        return Part(name, title, seconds, (str(HERE / "gpu_parts.py"), name, *flags))

    def bench(name: str, title: str, seconds: float) -> Part:
        minutes = str(seconds / 60)
        arguments = ("--parts", name, "--rounds", "1", "--quick", "--minutes", minutes)
        return Part(name, title, seconds, (str(HERE / "gpu.py"), *arguments, *flags))

    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text("utf-8")]
    tests = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *map(str, sorted(marked)))
    yield Part("tests", "the tests that need a GPU", 100, tests, "pytest")
    yield own("learn", "a reward rises in twelve updates", 60)
    yield own("equality", "fast paths give the gradient and the tokens of the plain ones", 70)
    if not tiny:  # it starts several processes, as two others do
        yield bench("memory", "peaks of an update", 100)
    yield bench("head", "time and memory of the bounded head", 50)
    if not tiny:
        yield bench("shortage", "recovery from running out of memory", 60)
    yield own("fragmentation", "memory reserved beyond what is allocated, over 50 updates", 50)
    if not tiny:
        yield bench("steps", "seconds of an update by phase", 80)
        engines = (str(HERE / "generation.py"), "--rounds", "1")
        yield Part("engines", "vLLM against own decoding, sync, sleep", 150, engines, "vllm")


def run(part: Part, seconds: float, store: Store, site: list[str]) -> dict[str, Any]:
    """Run a part until its deadline, and keep what it has printed by then.

    Returns:
        `results`, the lines of JSON; `seconds`; and `error`, if it failed or was cut short.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *site])
    settings = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"BENCH_SITE": os.pathsep.join(site), "TOKENIZERS_PARALLELISM": "false"}
    outcome: dict[str, Any] = {"results": []}
    begun = time.monotonic()
    printed = [""]
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads could fill)
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        for line in process.stdout or ():
            printed.append(line.strip())
            if line.startswith("{"):
                outcome["results"].append(json.loads(line))
                store.add(f"check {part.name}", part, dict(outcome))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    code = process.wait()
    outcome["seconds"] = round(time.monotonic() - begun, 1)
    if code:
        late = f"no end after {seconds:.0f} seconds" if code == -signal.SIGKILL else f"exit {code}"
        errors.seek(0)
        outcome["error"] = " | ".join([late, *printed[-3:], *errors.read().splitlines()[-4:]])
    elif not outcome["results"]:
        outcome["results"] = [{"said": printed[-1]}]
    store.add(f"check {part.name}", part, dict(outcome))
    return outcome


def missing() -> list[str]:
    """Return which packages are missing or too old, and which parts are skipped without them."""
    problems = []
    for name, floor in floors().items():
        try:
            have = release(version(name))
        except PackageNotFoundError:
            problems.append(f"{name} is not installed; make gpu-wheels, then SITE=.gpu-site")
            continue
        if have < release(floor):
            problems.append(f"{name} {version(name)} is older than {floor}")
    return problems


def release(text: str) -> list[int]:
    """Return the numbers of a version: [2, 11, 0] for 2.11.0+cu128."""
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


def floors() -> dict[str, str]:
    """Return the minimum versions of the needed packages, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pairs = [line.split(">=") for line in project["dependencies"] if ">=" in line]
    return {name: floor for name, floor in pairs if name in NEEDED}


def describe(outcome: dict[str, Any]) -> str:
    """Summarize the outcome of a part."""
    if "error" in outcome:
        return f"FAILED: {outcome['error']}"
    texts = [", ".join(f"{k} {v}" for k, v in result.items()) for result in outcome["results"]]
    return "; ".join(texts)


def main() -> int:
    """Run all parts that fit; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the least sizes, to try the program")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run (default 8)")
    parser.add_argument("--site", nargs="*", default=[], help="folders with more packages")
    parser.add_argument("--parts", nargs="*", help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of gpu.json")
    options = parser.parse_args()
    for name in USED:
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: what needs it is left out", flush=True)
    if lacking := missing():
        print("; ".join(lacking))
        return 1
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU was found; to try the program: --device cpu --tiny")
        return 1
    site = [str(Path(folder).resolve()) for folder in options.site]
    store = Store(options.results / "gpu.json")
    failed = 0
    os.environ["BENCH_RESULTS"] = str(options.results)
    end = time.monotonic() + 60 * options.minutes
    for part in parts(options.device, options.tiny):
        left = end - time.monotonic()
        if options.parts and part.name not in options.parts:
            continue
        if part.needs and importlib.util.find_spec(part.needs) is None:
            print(f"{part.name}: left out, {part.needs} is not installed", flush=True)
            continue
        if left < 5:
            print(f"{part.name}: no time left", flush=True)
            continue
        print(f"{part.name}: {part.what}", flush=True)
        outcome = run(part, min(part.seconds, left), store, site)
        failed += "error" in outcome
        print(f"  {outcome['seconds']:.0f} s: {describe(outcome)}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
