"""Write docs/benchmarks/engines.md: which memory saving works with which engine and adapter.

The cells come from tests that prove them, by the marker `covers` that tests/distributed/README.md
describes. With `--check`, the page is compared instead of written.
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
        "training",
        "Online DPO",
        "PPO",
        "PPO with a value model",
        "reference",
        "sync_ref_model",
        "shared_prefix",
        "logits_chunk_size",
        "skip_zero_advantages",
        "reuse_sampling_logps",
        "generation_max_rows",
        "gradient_checkpointing",
        "activation_offloading",
        "num_iterations",
        "recover_from_oom",
        "ds3_gather_for_generation=true",
        "ds3_gather_for_generation=false",
        "resume",
    ),
    "adapter": ("none", "lora", "qlora"),
}
METHODS = ("Online DPO", "PPO", "PPO with a value model")  # the other rows are of RLOO
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
Cell = tuple[str, ...]  # engine, saving, adapter


@dataclass(frozen=True)
class Proof:
    """The cells that a marker of a test names."""

    test: str  # file and function
    cells: tuple[Cell, ...]
    refused: str | None = None  # the reason, if the test shows that the cells are refused


def cells_of(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[Cell]:
    """Return the cells that the arguments of a marker name.

    Args:
        arguments: arguments of `covers`. A list stands for each of its values, and "$name" for the
            value of a parameter.
        parameters: parameters of the test.

    Raises:
        ValueError: an argument or value is unknown.
    """
    unknown_arguments = set(arguments) - {*AXES, "refused"}
    if unknown_arguments or "engine" not in arguments:
        names = ", ".join(arguments)
        raise ValueError(f"covers({names}): it takes engine, saving, adapter, refused")
    values_by_axis = []
    for axis, legal_values in AXES.items():
        argument = arguments.get(axis, DEFAULTS.get(axis))
        values = [argument] if isinstance(argument, str) else list(argument)
        values = [
            parameters[value[1:]] if str(value).startswith("$") else value for value in values
        ]
        illegal_values = [value for value in values if value not in legal_values]
        if illegal_values:
            legal = ", ".join(legal_values)
            raise ValueError(f"covers({axis}={illegal_values[0]!r}): choose from {legal}")
        values_by_axis.append(values)
    return list(product(*values_by_axis))


class Collector:
    """A pytest plugin that reads the markers of the collected tests."""

    def __init__(self) -> None:
        self.proofs: list[Proof] = []

    def pytest_collection_modifyitems(self, items: Iterable[pytest.Function]) -> None:
        """Read the markers; pytest calls this."""
        for function in items:
            parameters = function.callspec.params if hasattr(function, "callspec") else {}
            test = f"{function.path.relative_to(ROOT).as_posix()}::{function.originalname}"
            for marker in function.iter_markers("covers"):
                cells = tuple(cells_of(marker.kwargs, parameters))
                self.proofs.append(Proof(test, cells, marker.kwargs.get("refused")))


def collect() -> list[Proof]:
    """Collect the proofs in the tests.

    Raises:
        RuntimeError: pytest cannot collect the tests.
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
    """Make the page of the documentation.

    Raises:
        ValueError: one test shows that a cell works, and another that it is refused.
    """
    works: set[Cell] = set()
    refused: dict[Cell, str] = {}
    tests: dict[str, set[Cell]] = {}
    for proof in proofs:
        tests.setdefault(proof.test, set()).update(proof.cells)
        if proof.refused is None:
            works.update(proof.cells)
        else:
            refused |= dict.fromkeys(proof.cells, proof.refused)
    contradictions = works & refused.keys()
    if contradictions:
        raise ValueError(f"{sorted(contradictions)[0]} is said to work and to be refused")
    reasons = sorted(set(refused.values()))
    sections = [INTRODUCTION]
    for adapter in AXES["adapter"]:
        title = "Without adapter" if adapter == "none" else f"With {adapter_name(adapter)}"
        sections.append(f"## {title}\n\n{_table(adapter, works, refused, reasons)}\n")
    if reasons:
        reason_lines = [f"{number}. {text}" for number, text in enumerate(reasons, 1)]
        sections.append("## Reasons\n\n" + "\n".join(reason_lines) + "\n")
    sections.append(f"## Tests\n\n{_tests(tests)}\n")
    return "\n".join(sections)


def adapter_name(adapter: str) -> str:
    """Return the usual spelling of an adapter's name."""
    return {"lora": "LoRA", "qlora": "QLoRA"}[adapter]


def _markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(
    adapter: str,
    works: set[Cell],
    refused: Mapping[Cell, str],
    reasons: list[str],
) -> str:
    rows = [["", *AXES["engine"]]]
    for saving in AXES["saving"]:
        if saving in METHODS and adapter != "none":
            continue
        cells = [(engine, saving, adapter) for engine in AXES["engine"]]
        texts = [_cell_text(cell, works, refused, reasons) for cell in cells]
        rows.append([_row_title(saving), *texts])
    return _markdown(rows)


def _row_title(saving: str) -> str:
    if saving in METHODS:
        return saving
    return "training itself" if saving == "training" else f"`{saving}`"


def _cell_text(
    cell: Cell,
    works: set[Cell],
    refused: Mapping[Cell, str],
    reasons: list[str],
) -> str:
    engine, saving, _ = cell
    if cell in works:
        return "yes"
    if cell in refused:
        return f"refused ({reasons.index(refused[cell]) + 1})"
    if saving.startswith("ds3_") and engine not in SHARDED:
        return "same"
    return "-"


def _tests(tests: Mapping[str, set[Cell]]) -> str:
    """Make a table of the tests with the values of their cells."""
    rows = [["test", *AXES]]
    for test, cells in sorted(tests.items()):
        columns = []
        for index, legal_values in enumerate(AXES.values()):
            values = {cell[index] for cell in cells}
            columns.append(", ".join(value for value in legal_values if value in values))
        rows.append([f"`{test}`", *columns])
    return _markdown(rows)


def main(argv: list[str] | None = None) -> int:
    """Write the page, or compare it with the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    options = parser.parse_args(argv)
    text = page(collect())
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the tests say: run `make engine-table`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
