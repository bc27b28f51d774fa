"""Which memory saving works on which engine with which adapter: docs/benchmarks/engines.md.

Nothing is typed: the cells are those that tests say they prove, by the marker `covers` that
tests/distributed/README.md describes. Without `--check` the page is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "engines.md"
FOLDERS = ("distributed", "adapters", "invariance")
AXES: dict[str, tuple[str, ...]] = {
    "engine": ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"),
    "saving": (
        *("training", "Online DPO", "PPO", "PPO with a value model"),
        *("reference", "sync_ref_model", "shared_prefix", "logits_chunk_size"),
        *("skip_zero_advantages", "reuse_sampling_logps", "generation_max_rows"),
        *("gradient_checkpointing", "activation_offloading", "num_iterations", "recover_from_oom"),
        *("ds3_gather_for_generation=true", "ds3_gather_for_generation=false", "resume"),
    ),
    "adapter": ("none", "lora", "qlora"),
}
METHODS = AXES["saving"][1:4]  # further trainers; the other rows are of RLOO
DEFAULTS = {"saving": "training", "adapter": "none"}
INTRODUCTION = """# Engines, savings and adapters

Made from the tests by `make engine-table`. *yes*: a test runs the combination on several processes
and compares the result with that of one process, or of the run without the saving. *refused*: a
test shows the error; the number leads to the reason. *same*: each rank has whole weights, so the
option changes nothing. *-*: no test. Rows that name no trainer are for RLOO. `recover_from_oom` is
shown for generation; with several processes, a training pass that runs out of memory is an error.
With an adapter, `sync_ref_model` is shown for a model that already had the adapter: the reference
of a new adapter is the base model, which cannot move. The [certificate](invariance.md) has the
results on one process.
"""
SHARDED = ("zero3", "fsdp1", "fsdp2")  # engines for which `ds3_gather_for_generation` matters


@dataclass(frozen=True)
class Proof:
    """A marker of a test.

    Args:
        test (`str`): file and function.
        cells (`tuple`): of engine, saving and adapter each.
        refused (`str`, *optional*): why, if the test shows an error.
    """

    test: str
    cells: tuple[tuple[str, str, str], ...]
    refused: str | None = None


def cells_of(marked: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells that the arguments of a marker name.

    Args:
        marked: arguments of `covers`; a list stands for each of its values, "$name" for the value
            of a parameter.
        parameters: of the test.

    Raises:
        ValueError: for a value or an argument that is not known.
    """
    unknown = set(marked) - {*AXES, "refused"}
    if unknown or "engine" not in marked:
        raise ValueError(f"covers({', '.join(marked)}): it takes engine, saving, adapter, refused")
    chosen = []
    for axis, known in AXES.items():
        given = marked.get(axis, DEFAULTS.get(axis))
        values = [given] if isinstance(given, str) else list(given)
        values = [parameters[v[1:]] if str(v).startswith("$") else v for v in values]
        strange = [value for value in values if value not in known]
        if strange:
            raise ValueError(f"covers({axis}={strange[0]!r}): choose from {', '.join(known)}")
        chosen.append(values)
    return list(product(*chosen))


class Collector:
    """A plugin of pytest that reads the markers of the tests it finds."""

    def __init__(self) -> None:
        self.proofs: list[Proof] = []

    def pytest_collection_modifyitems(self, items: Iterable[Any]) -> None:
        """Read the markers; pytest calls this."""
        for item in items:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            test = f"{item.path.relative_to(ROOT).as_posix()}::{item.originalname}"
            for marker in item.iter_markers("covers"):
                cells = tuple(cells_of(marker.kwargs, parameters))
                self.proofs.append(Proof(test, cells, marker.kwargs.get("refused")))


def collect() -> list[Proof]:
    """All proofs in the tests.

    Raises:
        RuntimeError: if a test cannot be read.
    """
    collector = Collector()
    folders = [str(ROOT / "tests" / name) for name in FOLDERS if (ROOT / "tests" / name).exists()]
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    with redirect_stdout(StringIO()):
        status = pytest.main([*options, *folders], plugins=[collector])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest --collect-only ended with {status!r}: run it to see why")
    return collector.proofs


def page(proofs: Iterable[Proof]) -> str:
    """The page of the documentation.

    Raises:
        ValueError: if one test shows that a cell works and another that it is refused.
    """
    works: set[tuple[str, ...]] = set()
    refused: dict[tuple[str, ...], str] = {}
    tests: dict[str, set[tuple[str, ...]]] = {}
    for proof in proofs:
        tests.setdefault(proof.test, set()).update(proof.cells)
        if proof.refused is None:
            works.update(proof.cells)
        else:
            refused |= dict.fromkeys(proof.cells, proof.refused)
    both = works & refused.keys()
    if both:
        raise ValueError(f"{sorted(both)[0]} is said to work and to be refused")
    reasons = sorted(set(refused.values()))
    parts = [INTRODUCTION]
    for adapter in AXES["adapter"]:
        title = "Without adapter" if adapter == "none" else f"With {adapter_name(adapter)}"
        parts.append(f"## {title}\n\n{_table(adapter, works, refused, reasons)}\n")
    if reasons:
        listed = "\n".join(f"{number}. {text}" for number, text in enumerate(reasons, 1))
        parts.append(f"## Reasons\n\n{listed}\n")
    parts.append(f"## Tests\n\n{_tests(tests)}\n")
    return "\n".join(parts)


def adapter_name(adapter: str) -> str:
    """As people write it."""
    return {"lora": "LoRA", "qlora": "QLoRA"}[adapter]


def _markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(
    adapter: str,
    works: set[tuple[str, ...]],
    refused: Mapping[tuple[str, ...], str],
    reasons: list[str],
) -> str:
    rows = [["", *AXES["engine"]]]
    for saving in AXES["saving"]:
        cells = [(engine, saving, adapter) for engine in AXES["engine"]]
        if saving in METHODS and adapter != "none":
            continue
        words = [_word(cell, works, refused, reasons) for cell in cells]
        rows.append([_named(saving), *words])
    return _markdown(rows)


def _named(saving: str) -> str:
    if saving in METHODS:
        return saving
    return "training itself" if saving == "training" else f"`{saving}`"


def _word(
    cell: tuple[str, ...],
    works: set[tuple[str, ...]],
    refused: Mapping[tuple[str, ...], str],
    reasons: list[str],
) -> str:
    engine, saving, _ = cell
    if cell in works:
        return "yes"
    if cell in refused:
        return f"refused ({reasons.index(refused[cell]) + 1})"
    return "same" if saving.startswith("ds3_") and engine not in SHARDED else "-"


def _tests(tests: Mapping[str, set[tuple[str, ...]]]) -> str:
    rows = [["test", *AXES]]
    for test, cells in sorted(tests.items()):
        found = []
        for place, known in enumerate(AXES.values()):
            values = {cell[place] for cell in cells}
            found.append(", ".join(value for value in known if value in values))
        rows.append([f"`{test}`", *found])
    return _markdown(rows)


def main(words: list[str] | None = None) -> int:
    """Write the page, or compare it with the tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    arguments = parser.parse_args(words)
    text = page(collect())
    if not arguments.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the tests say: run `make engine-table`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
