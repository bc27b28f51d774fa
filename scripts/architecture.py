"""Write docs/architecture.md from the imports and classes of the package.

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
PACKAGE = ROOT / "trl"
PAGE = ROOT / "docs" / "architecture.md"
TRAINERS = (
    "RLOOTrainer",
    "GRPOTrainer",
    "OnlineDPOTrainer",
    "PPOTrainer",
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
)
# For each guarantee, the module that implements it, and the test that checks it.
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


def main(argv: list[str]) -> int:
    """Write the page, or check that it is up to date; return the exit status."""
    text = page()
    if "--check" in argv:
        is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if is_current:
            return 0
        print("docs/architecture.md is stale: run python scripts/architecture.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


@cache
def page() -> str:
    """Return the text of docs/architecture.md."""
    arrows = folder_arrows()
    return TEXT.format(
        picture=picture(arrows),
        lines=lines_table(sorted(arrows)),
        classes=class_tree(),
        guarantees=guarantee_table(),
    )


def folder_of(module: str) -> str | None:
    """Return the folder or file directly below the package that a module belongs to."""
    parts = module.split(".")[1:]
    return parts[0] if parts else None


def folder_arrows() -> dict[str, set[str]]:
    """Return, for each part of the package, the parts that it imports."""
    arrows: dict[str, set[str]] = {}
    for module, targets in structure.import_graph(PACKAGE, inside_functions=True).items():
        part = folder_of(module)
        if part is not None:
            arrows.setdefault(part, set())
            arrows[part] |= {folder_of(target) for target in targets} - {part, None}
    return arrows


def picture(arrows: dict[str, set[str]]) -> str:
    """Draw the parts by level, the highest first, each with an arrow to the parts it imports.

    The level of a part is one above the highest level that it imports.
    """
    levels: dict[str, int] = {}
    while len(levels) < len(arrows):
        ready = [part for part in arrows if part not in levels and arrows[part] <= levels.keys()]
        if not ready:
            circle = set(arrows) - set(levels)
            raise ValueError(f"Folders import each other in a circle: {circle}.")
        new_levels = {
            part: 1 + max((levels[target] for target in arrows[part]), default=-1) for part in ready
        }
        levels |= new_levels
    width = max(map(len, arrows))
    rows = []
    for level in sorted(set(levels.values()), reverse=True):
        for part in sorted(part for part in levels if levels[part] == level):
            targets = sorted(arrows[part], key=lambda target: (-levels[target], target))
            arrow = f" -> {', '.join(targets)}" if targets else ""
            rows.append(f"{level}  {part:<{width}}{arrow}".rstrip())
    return "\n".join(["```text", *rows, "```"])


def lines_table(parts: list[str]) -> str:
    """Make a table of the files and lines of each part, with the first line of its docstring."""
    rows = ["| part | files | lines, about | what |", "| --- | ---: | ---: | --- |"]
    for part in parts:
        folder = PACKAGE / part
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]
        main_file = folder / "__init__.py" if folder.is_dir() else files[0]
        description = ""
        if main_file.exists():
            tree = ast.parse(main_file.read_text(encoding="utf-8"))
            description = (ast.get_docstring(tree) or "").partition("\n")[0]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        rows.append(f"| `{part}` | {len(files)} | {round(lines, -2):,} | {description} |")
    return "\n".join(rows)


def class_tree() -> str:
    """Make a table of the trainers' classes with their bases, lines of code and files."""
    classes = structure.classes_of(PACKAGE)
    rows = ["| class | inherits from | lines, about | file |", "| --- | --- | ---: | --- |"]
    names = [
        ancestor.name for trainer in TRAINERS for ancestor in structure.chain(classes, trainer)
    ]
    for name in sorted(dict.fromkeys(names), key=names.count):  # the most common bases come last
        class_ = classes[name]
        bases = ", ".join(f"`{base}`" for base in class_.bases if base in classes)
        file = class_.module.replace(".", "/") + ".py"
        rows.append(f"| `{name}` | {bases} | {round(class_.lines, -1)} | `{file}` |")
    return "\n".join(rows)


def guarantee_table() -> str:
    """Make a table of the guarantees, the modules that implement them, and their tests.

    Raises:
        FileNotFoundError: one of the files does not exist.
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
