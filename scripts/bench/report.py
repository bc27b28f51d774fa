"""Writes docs/benchmarks/*.md and the charts from the results that are there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import goals
import gpu_report
import step_report
from memory import (
    BEST_COUNTS,
    COUNTS,
    GENERATION_ROWS,
    GENERATION_SHAPES,
    HEADLINE,
    LEAN,
    SCALE,
    SETTINGS,
    SHAPES,
    method_sizes,
    method_vocabulary,
    size_words,
)
from runs import RESULTS, Work
from tables import (
    Rows,
    divided,
    growth_table,
    markdown,
    megabytes,
    peak_table,
    phase_peak_table,
    phase_table,
    provenance,
    reduction_table,
    times,
)

CELL = {"prompt": HEADLINE[0], "completion": HEADLINE[1], "completions": 8}
REPORT_CELL = {"prompt": 3020, "completion": 100}
BASES = {
    "trl 0.20.0 (estimate)": ("old", float(SCALE)),
    "trl 0.22.2": ("first", 1.0),
    "trl 1.16.0 on a CPU": ("now", 1.0),
    "trl 1.16.0, GPU path": ("now-gpu", 1.0),
}


def titles_in(rows: Rows, leave_out: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the measured settings with their titles, in the order of the experiment."""
    measured = rows.settings()
    return {n: s.title for n, s in SETTINGS.items() if n in measured and n not in leave_out}


def version_table(rows: Rows) -> str:
    """Make a table of the versions of every trainer."""
    packages = ("trl", "torch", "transformers", "accelerate", "datasets")
    lines = {}
    for row in rows.all:
        for run in row["runs"]:
            if "versions" in run:
                lines[row["work"]["trainer"]] = [run["versions"].get(p, "-") for p in packages]
    return markdown(packages, [lines[name] for name in sorted(lines)])


INTRODUCTION = f"""# Memory of one update

Made by `make bench-memory` (measures, into `memory.json`) and `make bench-report` (writes this
page). Results are part of the repository, so in a clean clone `make bench-memory` measures only the
cells that `memory.json` lacks. `make bench-memory ARGS="--again"` measures all of them again,
`ARGS="--again all default"` those of some settings, and `ARGS="--results folder"` measures
into another file and leaves these results unchanged.

**The work.** One prompt, k completions, the whole group in one micro-batch, two optimizer steps of
RLOO with a KL penalty (`beta=0.05`). In the second step, the states of AdamW already exist. The
model is a random Qwen3: hidden size 8, two layers, four heads of width 128 on two key-value heads,
vocabulary 151,936, untied head; it is small, so that the parts that grow with tokens and vocabulary
dominate. Weights are float32, computation is bfloat16 by autocast, gradient checkpointing is on,
AdamW is fused, one thread. Prompts and completions have exactly the stated numbers of tokens; no
completion ends early. Rewards differ within the group, so every completion has an advantage.

**The meter.** The peak is the largest number of bytes that torch's CPU allocator holds, minus the
bytes held at the start of `train()`. It includes temporaries inside operations: a preloaded library
counts every block (`scripts/bench/cpumem.c`). Weights of policy and reference are loaded before
that and therefore not counted. MB = 1e6 bytes.

**The settings.** Each release runs in its own environment through its public interface.

- *trl 0.20.0* works on token ids and holds logits of prompts and completions. At the full
  vocabulary it needs up to 100 GB, so most of its cells have vocabulary {151_936 // SCALE:,},
  scaled down by {SCALE}; {SCALE} times as much is an estimate for the full vocabulary. Cells
  measured at both sizes show how close the estimate is.
- *trl 1.16.0 on a CPU* is what its CPU users have. *Its GPU path* is the same release with the
  two kernels that it runs on a GPU replaced by functions that read a row at a time
  (`scripts/bench/gpu_path.py`). Losses and gradient norms of both agree to four digits. Float32
  copies of its tiles are not counted, because a GPU may not need them: the figure is a lower bound
  of what its GPU users hold. Its time is not meaningful and is left out.
- *This project* has its savings switched on one after another, each line with those above it: the
  bounded head (`logits_chunk_size`), the shared prompt (`shared_prefix`), no scoring pass of the
  policy and no pass for rows of zero advantage (`reuse_sampling_logps`, `skip_zero_advantages`),
  generation of at most {GENERATION_ROWS} rows at once (`generation_max_rows`), and the smallest
  sizes: generation of {LEAN["generation_max_rows"]} rows at once, and {LEAN["logits_chunk_size"]:,}
  logits (`logits_chunk_size`).

Numbers in brackets were not run, for lack of memory or time: they are twice the peak of half as
many completions. A dash means not measured.
"""


def peak_section(rows: Rows) -> str:
    """Make tables of the peaks of every shape."""
    text = "## Peak\n"
    for prompt, completion in SHAPES:
        text += f"\n### Prompt {prompt:,}, completion {completion}\n\n"
        shape = {"prompt": prompt, "completion": completion}
        text += peak_table(rows, titles_in(rows), COUNTS, **shape) + "\n"
    text += "\n![Peak against the number of completions](peak_against_k.png)\n\n"
    text += "### Growth with the number of completions, prompt 3,100, completion 53\n\n"
    shape = {"prompt": HEADLINE[0], "completion": HEADLINE[1]}
    return text + growth_table(rows, titles_in(rows, ("old-full",)), **shape) + "\n"


def reduction_section(rows: Rows) -> str:
    """Make tables of how many times less memory each setting takes."""
    text = "## Reduction\n"
    for work in (CELL, {"prompt": 512, "completion": 256, "completions": 8}):
        text += (
            f"\nHow many times less than each peer, prompt/completion/k = {size_words(work)}:\n\n"
        )
        text += reduction_table(rows, titles_in(rows, ("old", "old-full")), BASES, **work) + "\n"
    return text


def phase_section(rows: Rows) -> str:
    """Make tables of peaks, tokens and time by phase."""
    shape = "prompt 3,100, completion 53, k = 8"
    text = f"## Where the bytes are: peak by phase, {shape}, MB\n\n"
    text += phase_table(rows, titles_in(rows), "phase_peaks", **CELL)
    text += "\n\n![Memory over time by phase](memory_over_time.png)\n\n"
    text += f"## Tokens through the model in one step, {shape}\n\n"
    text += phase_table(rows, titles_in(rows), "tokens", **CELL)
    text += "\n\n![Tokens through the model](tokens.png)\n\n"
    text += f"## Processor seconds of one step, {shape}\n\n"
    text += "One thread; the model is tiny, so this is mostly attention over prompts and the head. "
    text += "For time on a model where computation dominates see `step.md`.\n\n"
    text += phase_table(rows, titles_in(rows, ("now-gpu",)), "cpu_seconds", **CELL)
    return text + "\n\n![Processor seconds](time_per_step.png)\n"


def generation_section(rows: Rows) -> str:
    """Make tables of the peaks of generation."""
    text = """## Peak of generation

With `generation_max_rows`, only that many completions of a prompt decode at the same time, so the
memory of generation does not grow with their number.
"""
    titles = {name: SETTINGS[name].title for name in ("all", "lean", "default")}
    titles["all"] += f", {GENERATION_ROWS} rows at once"
    titles["lean"] += f", {LEAN['generation_max_rows']} rows at once"
    for prompt, completion in GENERATION_SHAPES:
        shape = {"prompt": prompt, "completion": completion}
        text += f"\nPrompt {prompt:,}, completion {completion}:\n\n"
        text += phase_peak_table(rows, titles, COUNTS, "generation", **shape) + "\n"
    return text


def micro_batch_section(rows: Rows) -> str:
    """Make tables of micro-batches of one row."""
    sizes = [
        {"prompt": prompt, "completion": completion, "completions": count}
        for prompt, completion in sorted(SHAPES)
        for count in BEST_COUNTS
    ]
    lines = [
        [title, *(rows.cell(name, micro_batch=1, **size) for size in sizes)]
        for name, title in titles_in(rows).items()
        if any(rows.peaks(name, micro_batch=1, **size) for size in sizes)
    ]
    heads = ["MB", *map(size_words, sizes)]
    return "## One completion in each micro-batch\n\n" + markdown(heads, lines) + "\n"


def grpo_section(rows: Rows) -> str:
    """Make a table of the same work with GRPO."""
    text = "## GRPO\n\n"
    grpo = [
        [title, rows.cell(name, algorithm="GRPO", **CELL), rows.cell(name, **CELL)]
        for name, title in titles_in(rows).items()
        if rows.peaks(name, algorithm="GRPO", **CELL)
    ]
    return text + markdown(["MB, 3,100/53/8, beta 0.05", "GRPO", "RLOO"], grpo) + "\n"


def methods_section(rows: Rows) -> str:
    """Make tables of Online DPO and PPO with the peers that have them."""
    lines = []
    launches = 0
    for method, peers, sizes in method_sizes():
        for peer in peers:
            peaks = [rows.peak(name, algorithm=method, **sizes) for name in (peer, "default")]
            share = times(divided(peaks[1], peaks[0]))
            shown = [
                f"{method_vocabulary(sizes):,}",
                SETTINGS[peer].title,
                *map(megabytes, peaks),
                share,
            ]
            lines.append([f"{METHOD_TITLES[method]}, {size_words(sizes)}", *shown])
            launches += (rows.run(peer, algorithm=method, **sizes) or {}).get("launches", 0)
    headers = ["MB", "vocabulary", "peer", "its peak", "this project, defaults", "ours / its"]
    return f"""## Online DPO and PPO

The peers are the newest releases that have these trainers. k counts the completions of an update,
all in one micro-batch: those of k / 2 prompts by Online DPO, and of k prompts by PPO, one each. PPO
has a value model and a reward model of the policy's shape on both sides, and trains once on each
round. Both sides have the full vocabulary if an update has one prompt, and the smaller one with k =
8, where a peer would need up to 55 GB with the full one.

Online DPO of trl 1.16.0 computes its log-probabilities on a GPU as it does on a CPU: in its runs on
the GPU path, which count how often the kernels of the head are called, they were called {launches}
times. Here that path differs only in that float32 copies are not counted.

{markdown(headers, lines)}
"""


METHOD_TITLES = {"OnlineDPO": "Online DPO", "PPO": "PPO"}


def change(value: float | None, base: float | None) -> str:
    """Format the relative change from a base in percent; an empty text if a value is missing."""
    share = divided(value, base)
    return "" if share is None else f" ({round(100 * (share - 1)):+d} %)"


def claim_section(rows: Rows) -> str:
    """Explain the reduction that was reported for string-level repetition."""
    ways = ("tokens", "strings-1024", "strings")
    lines = []
    for name, count in (("old", 2), ("old", 4), ("old", 8), ("old-full", 2)):
        work = {**REPORT_CELL, "completions": count}
        peaks = [
            rows.peak(name, **work, **({} if way == "tokens" else {"prompts": way})) for way in ways
        ]
        shown = [f"{megabytes(peak)}{change(peak, peaks[0])}" for peak in peaks[1:]]
        lines.append([f"{count}, {SETTINGS[name].title}", megabytes(peaks[0]), *shown])
    headers = ["k", "original", "proposal, cut at 1,024 tokens", "proposal, not cut"]
    return f"""## Where a reported reduction of 55-59 % comes from

A proposal for trl 0.20.0 repeats prompts as strings and tokenizes them again, instead of
repeating token ids, and reports 55-59 % less memory for prompts of about 3,020 tokens. It
tokenizes with `truncation=True, max_length=1024`, so it cuts the prompts to a third. Here the
same trainer is given its data in that way, with the cut and without it (`RepeatedStrings` in
`scripts/bench/trainers.py`); 100 new tokens:

{markdown(headers, lines)}

The reduction comes from the cut. Repeated token ids take k x prompt x 8 bytes, {
        8 * 3020 * 8 / 1e6:.1f} MB at k = 8; repeating strings ends in the same tensors.
"""


BLOCKS = """## What explains the bytes

The largest blocks alive at the peak, and the operation that made each with the shape of its first
large input. To name them, operations are run from Python, which holds their inputs until they
return. Gradients that autograd otherwise adds in place then need one more block, so a peak here can
be above that of its cell.
"""


def blocks_section(rows: Rows) -> str:
    """Make a table of the largest blocks at the peak, by the operation that allocated them."""
    text = BLOCKS
    small = {"prompt": 512, "completion": 53, "completions": 2}
    for name, setting in SETTINGS.items():
        work = small if name == "now" else CELL
        run = rows.run(f"{name}/blocks", **work)
        if run is None:
            continue
        cell = megabytes(rows.peak(name, **work))
        text += f"\n{setting.title}, {size_words(work)}, peak {megabytes(run['peak'])} MB"
        text += f" (cell: {cell} MB):\n\n"
        lines = [
            [f"`{block['operation']}`", block["phase"], f"{block['bytes'] / 1e6:,.1f}"]
            for block in run["blocks"][:6]
        ]
        text += markdown(["operation", "phase", "MB"], lines) + "\n"
    return text


def spread_section(rows: Rows) -> str:
    """Make a table of the differences between repeated runs."""
    lines = []
    for row in rows.all:
        peaks = [run["peak"] for run in row["runs"] if "peak" in run]
        if len(peaks) < 3:
            continue
        work = Work(**row["work"])
        sizes = f"{work.prompt:,}/{work.completion}/{work.completions}"
        title = SETTINGS[row["setting"]].title
        spread = times(100 * (max(peaks) / min(peaks) - 1))
        lines.append([f"{title}, {sizes}", str(len(peaks)), megabytes(peaks[0]), f"{spread} %"])
    text = "## Spread\n\nBytes hardly vary, so every other cell is a single run.\n\n"
    return text + markdown(["cell", "runs", "MB", "highest over lowest"], lines) + "\n"


def memory_report(results: Path) -> None:
    """Write memory.md and its charts."""
    import charts

    data = json.loads((results / "memory.json").read_text(encoding="utf-8"))
    rows = Rows(data["rows"])
    sections = [f"{INTRODUCTION}\n{provenance(data)}\n\n{version_table(rows)}\n"]
    section_functions = (peak_section, reduction_section, phase_section, generation_section)
    section_functions += (
        micro_batch_section,
        grpo_section,
        methods_section,
        claim_section,
        blocks_section,
        spread_section,
    )
    sections += [part(rows) for part in section_functions]
    (results / "memory.md").write_text("\n".join(sections), encoding="utf-8")
    titles = titles_in(rows)
    charts.peak_against_count(rows, titles, COUNTS, results / "peak_against_k.png")
    headline = {name: titles[name] for name in ("first", "now-gpu", "default") if name in titles}
    charts.peak_against_count(rows, headline, COUNTS, results / "peak.png", [HEADLINE])
    charts.memory_over_time(rows, titles, results / "memory_over_time.png", **CELL)
    charts.stacked(rows, titles, "tokens", results / "tokens.png", **CELL)
    timed = titles_in(rows, ("now-gpu",))
    charts.stacked(rows, timed, "cpu_seconds", results / "time_per_step.png", **CELL)


def main() -> None:
    """Write the pages whose results are available."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    results = parser.parse_args().results
    writers = {
        "memory": memory_report,
        "step": step_report.step_page,
        "gpu": gpu_report.gpu_page,
    }
    for name, write in writers.items():
        if (results / f"{name}.json").exists():
            write(results)
            print(results / f"{name}.md")
    goals.goals_page(results)
    print(results / "goals.md")


if __name__ == "__main__":
    main()
