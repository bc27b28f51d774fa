"""Pages of step times, on a CPU and on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runs import Work
from step import BETA, CPU_MODEL, PEER, SHAPES, STEPS, phase_seconds
from tables import PHASES, markdown, provenance, ratio_with_spread

NAMES = {"this": "this project", PEER: PEER.replace("-", " ")}
TOKENS = ("generation", "scoring", "forward")


def pairs(rows: list[dict[str, Any]]) -> list[tuple[Work, list[Any], list[Any]]]:
    """Return, for each work, the runs of this project and of the peer."""
    runs: dict[Work, dict[str, list[Any]]] = {}
    for row in rows:
        if row["setting"] not in NAMES:
            continue
        work = Work(**{**row["work"], "trainer": "this"})
        good = [run for run in row["runs"] if "peak" in run]
        runs.setdefault(work, {})[row["setting"]] = good
    return [(w, r["this"], r[PEER]) for w, r in runs.items() if r.get("this") and r.get(PEER)]


def ratio_line(work: Work, ours: list[Any], theirs: list[Any]) -> list[str]:
    """Make a row of the table of ratios: times, peak and tokens."""
    line = [f"{work.algorithm} {work.prompt}/{work.completion}/{work.completions}"]
    for part in ("training", "generation", "total"):
        a, b = ([phase_seconds(run).get(part, 0.0) for run in runs] for runs in (ours, theirs))
        middle, low, high = ratio_with_spread(a, b)
        line.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
    a, b = ([phase_seconds(run, "cpu_seconds")["training"] for run in r] for r in (ours, theirs))
    line.append(f"{ratio_with_spread(a, b)[0]:.2f}")
    counted = [sum(run["steps"][-1]["tokens"].values()) for run in (ours[0], theirs[0])]
    peak = theirs[0]["peak"] / ours[0]["peak"]
    return [*line, f"{peak:.2f}", f"{counted[1] / counted[0]:.2f}"]


def detail_lines(work: Work, runs: list[Any], name: str) -> list[str]:
    """Make rows of the table of phases: seconds, tokens per second, peak."""
    timed = sorted((phase_seconds(run) for run in runs), key=lambda t: t["total"])
    middle = timed[len(timed) // 2]
    tokens = work.completions * (work.prompt + work.completion)
    rates = [tokens / middle["training"], tokens / middle["total"]]
    sizes = f"{work.algorithm} {work.prompt}/{work.completion}/{work.completions}"
    seconds = [f"{middle.get(p, 0.0):.3f}" for p in (*PHASES, "total")]
    peak = f"{runs[0]['peak'] / 1e6:,.0f}"
    return [f"{sizes}, {NAMES[name]}", *seconds, *(f"{rate:,.0f}" for rate in rates), peak]


def tables(run_pairs: list[tuple[Work, list[Any], list[Any]]]) -> str:
    """Make the tables of ratios and of seconds by phase."""
    headers = ["peer / this project", "scoring + training", "generation", "whole step"]
    headers += ["scoring + training, processor seconds", "peak", "tokens computed"]
    text = markdown(headers, [ratio_line(*pair) for pair in run_pairs])
    lines = []
    for work, ours, theirs in run_pairs:
        lines += [detail_lines(work, ours, "this"), detail_lines(work, theirs, PEER)]
    rates = ["tokens/s, scoring + training", "tokens/s, whole step", "peak MB"]
    return f"{text}\n\nSeconds of one step:\n\n" + markdown(["", *PHASES, "total", *rates], lines)


def method() -> str:
    """Describe how step times are measured."""
    return f"""Each run is a process of {STEPS} optimizer steps; the first warms up, and the median
of the others counts. The two trainers alternate; each pair of runs gives one ratio, and the table
shows the median with the lowest and the highest. Above 1, this project is faster or smaller. One
prompt of exactly P tokens, G completions of exactly C tokens (P/C/G), the whole group in one
micro-batch, bfloat16 by autocast over float32 weights, gradient checkpointing, fused AdamW; `beta`
{BETA["RLOO"]} for RLOO and {BETA["GRPO"]:g} for GRPO, their defaults. Tokens per second are G x (P
+ C) per step, however many tokens are computed for them. All options of this project are at their
defaults.
"""


def step_page(results: Path) -> None:
    """Write step.md from step.json."""
    data = json.loads((results / "step.json").read_text(encoding="utf-8"))
    run_pairs = pairs(data["rows"])
    scale = SHAPES[0][0] // max(work.prompt for work, *_ in run_pairs)
    text = f"""# Time of an optimizer step

Made by `make bench-step` and `make bench-report`. Results are part of the repository:
`make bench-step ARGS="--again"` measures again.

{provenance(data)}

{method()}
The model is a random Qwen3 of 4 layers and hidden size 256 with vocabulary
{CPU_MODEL["vocabulary"]:,}. Lengths of 2048/256, 512/512 and 64/1024 are divided by {scale}.
"""
    for vocabulary in sorted({work.vocabulary for work, *_ in run_pairs}, reverse=True):
        chosen = [pair for pair in run_pairs if pair[0].vocabulary == vocabulary]
        text += f"\n## Vocabulary {vocabulary:,}\n\n"
        if vocabulary != CPU_MODEL["vocabulary"]:
            text += "The peer's head is slow on a CPU; with few entries, the rest shows.\n\n"
        text += tables(chosen) + "\n"
    (results / "step.md").write_text(text, encoding="utf-8")
