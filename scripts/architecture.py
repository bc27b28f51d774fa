"""Writes docs/architecture.md from what the modules of the package import and define.

python scripts/architecture.py           # writes the page
python scripts/architecture.py --check   # fails when the page is stale
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import structure

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PAGE = ROOT / "trl", ROOT / "docs" / "architecture.md"
LEAVES = (
    *("RLOOTrainer", "GRPOTrainer", "OnlineDPOTrainer", "PPOTrainer"),
    *("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"),
)
# Each guarantee: what it says, where it is kept, and what shows it.
GUARANTEES = {
    "every token once: completions share the forward pass of their prompt": (
        "models/packed_layout.py",
        "tests/models/test_packed_layout.py",
    ),
    "a fast path has the gradient of single rows, within 5e-6": (
        "models/layout_check.py",
        "tests/invariance/test_certificate.py",
    ),
    "log-probabilities never hold more than one tile of logits": (
        "ops/linear_logprobs.py",
        "tests/ops/test_linear_logprobs.py",
    ),
    "a killed run ends as one that was left alone": (
        "trainer/base/checkpoint.py",
        "tests/distributed/test_kill_and_resume.py",
    ),
    "running out of memory makes batches smaller, not results other": (
        "memory/adaptive_batch.py",
        "tests/memory/test_adaptive_batch.py",
    ),
    "any engine and number of ranks trains the same": (
        "models/sharded.py",
        "tests/distributed/test_two_processes.py",
    ),
    "an engine that generates holds the weights that are trained": (
        "generation/vllm/weight_verifier.py",
        "tests/generation/vllm/test_weight_verifier.py",
    ),
    "NaN is an error, never a zero": ("online/guard.py", "tests/online/test_guard.py"),
    "layers import downwards, and no files in circles": (
        None,
        "tests/package/test_checks.py",
    ),
}
TEXT = """# Architecture

Made by `make format` (`python scripts/architecture.py`) from the sources; a test fails when it is
stale. What a step does is told in [how a step works](how_a_step_works.md).

## Folders

Each part of `trl/` points to the parts that it imports, inside functions too. All of them have a
lower number.

{picture}

## Lines

{lines}

## The classes of the trainers

`BaseTrainer` is a `transformers.Trainer`.

{classes}

## Where guarantees live

{guarantees}
"""


def main(words: list[str]) -> int:
    """Write the page, or compare it with what would be written."""
    text = page()
    if "--check" in words:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        print("docs/architecture.md is stale: run python scripts/architecture.py" * stale)
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


@cache
def page() -> str:
    """The text of docs/architecture.md."""
    arrows = folder_arrows()
    return TEXT.format(
        picture=picture(arrows),
        lines=lines_table(sorted(arrows)),
        classes=class_tree(),
        guarantees=guarantee_table(),
    )


def folder_of(module: str) -> str | None:
    """The folder or file directly below the package that a module belongs to."""
    parts = module.split(".")[1:]
    return parts[0] if parts else None


def folder_arrows() -> dict[str, set[str]]:
    """Which parts of the package each one imports."""
    arrows: dict[str, set[str]] = {}
    for module, targets in structure.import_graph(PACKAGE, inside_functions=True).items():
        own = folder_of(module)
        if own is not None:
            arrows.setdefault(own, set())
            arrows[own] |= {folder_of(target) for target in targets} - {own, None}
    return arrows


def picture(arrows: dict[str, set[str]]) -> str:
    """Parts by level, the highest first: each points to what it imports of other parts."""
    level: dict[str, int] = {}
    while len(level) < len(arrows):
        ready = [n for n in arrows if n not in level and arrows[n] <= level.keys()]
        if not ready:
            raise ValueError(f"Folders import each other in a circle: {set(arrows) - set(level)}.")
        level |= {n: 1 + max((level[t] for t in arrows[n]), default=-1) for n in ready}
    width = max(map(len, arrows))
    rows = []
    for height in sorted(set(level.values()), reverse=True):
        for name in sorted(n for n in level if level[n] == height):
            targets = sorted(arrows[name], key=lambda target: (-level[target], target))
            arrow = f" -> {', '.join(targets)}" if targets else ""
            rows.append(f"{height}  {name:<{width}}{arrow}".rstrip())
    return "\n".join(["```text", *rows, "```"])


def lines_table(parts: list[str]) -> str:
    """Files and lines of each part, and what its first docstring says."""
    rows = ["| part | files | lines, about | what |", "| --- | ---: | ---: | --- |"]
    for part in parts:
        folder = PACKAGE / part
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]
        headline = files[0] if not folder.is_dir() else folder / "__init__.py"
        said = ""
        if headline.exists():
            tree = ast.parse(headline.read_text(encoding="utf-8"))
            said = (ast.get_docstring(tree) or "").splitlines()[:1]
            said = said[0] if said else ""
        count = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)
        rows.append(f"| `{part}` | {len(files)} | {round(count, -2):,} | {said} |")
    return "\n".join(rows)


def class_tree() -> str:
    """What each trainer inherits from, with lines of code and where it stands."""
    classes = structure.classes_of(PACKAGE)
    rows = ["| class | inherits from | lines, about | file |", "| --- | --- | ---: | --- |"]
    every = [found.name for name in LEAVES for found in structure.chain(classes, name)]
    for name in sorted(dict.fromkeys(every), key=every.count):  # what all inherit from comes last
        found = classes[name]
        bases = ", ".join(f"`{base}`" for base in found.bases if base in classes)
        place = found.module.replace(".", "/") + ".py"
        rows.append(f"| `{name}` | {bases} | {round(found.lines, -1)} | `{place}` |")
    return "\n".join(rows)


def guarantee_table() -> str:
    """Each guarantee, the module that keeps it, and the test that shows it.

    Raises:
        FileNotFoundError: if one of the files is gone.
    """
    rows = ["| guarantee | kept by | shown by |", "| --- | --- | --- |"]
    for guarantee, (module, test) in GUARANTEES.items():
        module = f"trl/{module}" if module else "scripts/check_layers.py"
        for path in (module, test):
            if not (ROOT / path).exists():
                raise FileNotFoundError(f"{path}, which keeps or shows: {guarantee}.")
        rows.append(f"| {guarantee} | `{module}` | `{test}` |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
