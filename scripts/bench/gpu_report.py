"""The page and charts of the measurements on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import head_table
import step_report
from goals import Goal, against_peer, goal_table, speed
from memory import BEST_COUNTS, COUNTS, HEADLINE, SETTINGS
from runs import Work
from step import PEER, phase_seconds
from tables import Rows, divided, markdown, megabytes, peak_table, provenance, times

SHAPES = (HEADLINE, (512, 256))
HEAD_SHAPE = (8192, 4096, 128_256)  # of the goals
HEAD_BYTES = 3e9
HEAD_SPEED = 0.97
POLICIES = ("never", "auto", "always")
Pair = tuple[Work, list[Any], list[Any]]


def gpu_page(results: Path) -> None:
    """Write gpu.md and its charts from gpu.json."""
    data = json.loads((results / "gpu.json").read_text(encoding="utf-8"))
    # Tables of the memory experiment know no device.
    rows = Rows([{**row, "work": _without_device(row["work"])} for row in data["rows"]])
    pairs = step_report.pairs(data["rows"])
    devices = sorted({run["versions"].get("gpu", "a CPU") for run in good_runs(rows)})
    sections = [
        f"# On a GPU\n\nMade by `make bench-gpu` on {', '.join(devices)}.\n\n{provenance(data)}\n",
        f"## Goals\n\n{goal_table(gpu_goals(rows, pairs))}\n",
        check_section(rows),
        peak_section(rows),
        step_section(pairs),
        head_section(rows),
        cache_section(rows),
        shortage_section(rows),
    ]
    (results / "gpu.md").write_text("\n".join(filter(None, sections)), encoding="utf-8")
    draw(rows, pairs, results)


def good_runs(rows: Rows, *settings: str) -> list[dict[str, Any]]:
    """Return the successful runs of some settings, or of all."""
    chosen = [row for row in rows.all if not settings or row["setting"] in settings]
    return [run for row in chosen for run in row["runs"] if "peak" in run]


def check_section(rows: Rows) -> str:
    """Describe the results of `make gpu-check`, part by part."""
    lines = []
    for row in rows.all:
        if row["setting"].startswith("check "):
            last_run = row["runs"][-1]
            texts = [
                ", ".join(f"{k} {v}" for k, v in result.items()) for result in last_run["results"]
            ]
            outcome = last_run.get("error") or "; ".join(texts)
            lines.append([row["work"]["part"], f"{last_run.get('seconds', 0):.0f}", outcome])
    if not lines:
        return ""
    table = markdown(("part", "seconds", "found"), lines)
    return f"## First minutes\n\nMade by `make gpu-check`.\n\n{table}\n"


def titles_in(rows: Rows) -> dict[str, str]:
    """Return the titles of the measured settings of the memory experiment."""
    names = {name: setting.title for name, setting in SETTINGS.items()}
    names["now"] = PEER.replace("-", " ")
    return {name: title for name, title in names.items() if name in rows.settings()}


def gpu_goals(rows: Rows, pairs: list[Pair]) -> Iterator[Goal]:
    """Yield the goals on a GPU."""
    yield from against_peer(rows, "now", "on a GPU")
    for work, ours, theirs in pairs:
        for goal in speed([(work, ours, theirs)]):
            title = f"{model(work)}: {goal.what}".replace(", lengths / 1", "")
            yield Goal(title, goal.bound, goal.value, goal.at_least)
    figures = next((f for shape, f in head_figures(rows) if shape == HEAD_SHAPE), [])
    own = next((figure for figure in figures if figure["default"]), None)
    name = "head at {:,} tokens x {:,} x {:,}".format(*HEAD_SHAPE)
    yield Goal(f"{name}, GB", HEAD_BYTES / 1e9, own and own["peak"] / 1e9)
    fast = own and 1 / median(own["ratios"])
    yield Goal(f"{name}, times as fast as full logits", HEAD_SPEED, fast, at_least=True)
    for run in good_runs(rows, "shortage"):
        yield Goal("difference of weights after running out of memory", 5e-6, run["difference"])


def peak_section(rows: Rows) -> str:
    """Make tables of the peaks of the tiny model."""
    text = ""
    for prompt, completion in SHAPES:
        shape = {"prompt": prompt, "completion": completion}
        for micro_batch, counts in (({}, COUNTS), ({"micro_batch": 1}, BEST_COUNTS)):
            table = peak_table(rows, titles_in(rows), counts, **shape, **micro_batch)
            if table.count("\n") > 1:
                rest = ", one completion in each micro-batch" if micro_batch else ""
                text += f"## Peak, tiny model, {prompt:,}/{completion}{rest}\n\n{table}\n\n"
    return text and text + "![Peak against the number of completions](gpu_peak_against_k.png)\n"


def model(work: Work) -> str:
    """Name the model and the precision of a work."""
    dtype = json.loads(work.options).get("model_init_kwargs", {}).get("dtype")
    return f"{work.shape}, {f'{dtype} weights' if dtype else 'float32 weights, bf16 autocast'}"


def step_section(pairs: list[Pair]) -> str:
    """Times of optimizer steps."""
    text = f"## Time of an optimizer step\n\n{step_report.method()}\n" if pairs else ""
    for name in dict.fromkeys(model(work) for work, *_ in pairs):
        chosen = [pair for pair in pairs if model(pair[0]) == name]
        text += f"### Random model of the shape {name}\n\n{step_report.tables(chosen)}\n\n"
    return text and text + "![Seconds of a step](gpu_step_time.png)\n"


def head_figures(rows: Rows) -> list[tuple[tuple[int, ...], list[dict[str, Any]]]]:
    """Return the measured shapes of the head with their figures."""
    head_rows = [row for row in rows.all if row["setting"] == "head"]
    return [
        (tuple(row["work"]["shape"]), run["figures"])
        for row in head_rows
        for run in row["runs"][-1:]
        if "peak" in run
    ]


def head_section(rows: Rows) -> str:
    """The bounded head against full logits."""
    table_rows = [
        line for shape, figures in head_figures(rows) for line in head_table.lines(shape, figures)
    ]
    title = "## Bounded head against full logits"
    return (
        f"{title}\n\n{head_table.METHOD}\n{markdown(head_table.HEADERS, table_rows)}\n"
        if table_rows
        else ""
    )


def cache_section(rows: Rows) -> str:
    """Make a table of what returning cached blocks saves."""
    runs = {name: good_runs(rows, f"empty_cache={name}")[-1:] for name in POLICIES}
    figures_by_policy = {name: cache_figures(run[0]) for name, run in runs.items() if run}
    base = figures_by_policy.get("never", {})
    lines = []
    for name, figures in figures_by_policy.items():
        ratios = [times(divided(figures[key], base.get(key))) for key in ("reserved", "seconds")]
        shown = [megabytes(figures["allocated"]), megabytes(figures["reserved"]), ratios[0]]
        unused = f"{100 * figures['unused']:.1f} %"
        lines.append([f'`"{name}"`', *shown, unused, f"{figures['seconds']:.3f}", ratios[1]])
    headers = ["`empty_cache`", "most allocated, MB", "most reserved, MB", "over never"]
    headers += ["reserved and unused", "seconds a step", "over never"]
    text = """## Returning cached blocks

One process each; prompts of half to all of the length. Reserved is what the allocator holds of the
device; unused is the share of the most reserved that is above the most allocated.

"""
    return f"{text}{markdown(headers, lines)}\n" if lines else ""


def cache_figures(run: dict[str, Any]) -> dict[str, float]:
    """Return peak bytes allocated and reserved, the unused share, and seconds of a step."""
    allocated = run["held_before"] + run["peak"]
    reserved = run["scratch"]
    unused = 1 - allocated / reserved if reserved else 0.0
    seconds = phase_seconds(run)["total"]
    return {"allocated": allocated, "reserved": reserved, "unused": unused, "seconds": seconds}


def shortage_section(rows: Rows) -> str:
    """Make a table of the runs that were short of memory."""
    lines = []
    for run in good_runs(rows, "shortage"):
        peaks = [megabytes(run[name]) for name in ("whole", "room", "peak", "small")]
        counted = (
            ", ".join(f"{name} {n}" for name, n in run[key].items() if n)
            for key in ("failures", "pieces")
        )
        lines.append([*peaks, *counted, f"{run['difference']:.1e}"])
    headers = ["peak without a limit, MB", "limit, MB", "peak under it", "peak, fewer rows"]
    headers += ["out of memory, times", "rows at the end", "difference"]
    text = """## Running out of memory

The same training in three processes: without a limit, with a limit, and without a limit but with
the numbers of rows that the second one ended with. The last column is the largest difference
between the weights of the last two, divided by the largest change of a weight. Limits and peaks are
above what is held before training.

"""
    return f"{text}{markdown(headers, lines)}\n" if lines else ""


def draw(rows: Rows, pairs: list[Pair], results: Path) -> None:
    """Draw the charts if matplotlib is installed. They can also be drawn later from gpu.json."""
    try:
        import charts
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed: gpu.md is without charts")
        return

    path = results / "gpu_peak_against_k.png"
    charts.peak_against_count(rows, titles_in(rows), COUNTS, path, SHAPES)
    values = {}
    for work, ours, theirs in pairs:
        sizes = (
            f"{work.algorithm} {work.prompt}/{work.completion}/{work.completions}, {model(work)}"
        )
        for name, runs in (("this project", ours), (PEER.replace("-", " "), theirs)):
            values[f"{sizes}, {name}"] = phase_seconds(runs[0])
    if values:
        charts.bars(values, "seconds of one optimizer step", results / "gpu_step_time.png")


def _without_device(work: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in work.items() if name != "device"}
