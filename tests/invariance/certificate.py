"""Print how far every way of computing a gradient is from its definition.

`python tests/invariance/certificate.py [--write FILE]` ends with 1 if a bound is broken.
"""

import argparse
import gc
import logging
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import preferences
import supervised
import torch
import transformers
from cases import LOSSES, MODELS
from forced import SHORTEST_PASS, silence
from trajectories import CLASSES, OPTIMIZERS, STEPS, STEPS_ON_ENGINES, compare, curve
from two_ranks import EXACT as EXACT_ON_TWO
from two_ranks import ON_ENGINES, result, start
from two_ranks import VARIANTS as ON_TWO
from variants import (
    DIMENSIONS,
    OTHER_DIMENSIONS,
    STATISTIC_DIMENSIONS,
    TILE,
    Measured,
    Variant,
    covering,
    difference,
    draw,
    is_as_expected,
    measure,
    reference,
    reference_in,
)

BOUND = 5e-6  # of the relative difference in float32
HALF_PRECISION_FACTOR = 1.3  # times the error of single rows in the same precision
DEVIATION = 5e-5  # of two loss curves, as a share of their range
RESIDUAL = 5e-6  # the same, averaged over the steps
SAMPLES = 2

# Every pair of values, and a sample of all combinations.
_generator = random.Random(1)
_drawn = (draw(DIMENSIONS, _generator) for _ in range(10 * SAMPLES))
VARIANTS = covering(DIMENSIONS) + [variant for variant in _drawn if variant][:SAMPLES]
OF_OTHERS = covering(OTHER_DIMENSIONS)
OF_STATISTICS = covering(STATISTIC_DIMENSIONS)


def _left_out() -> list[Variant]:
    """Variants that leave out whole forwards, and variants that leave out rows of forwards."""
    dimensions = {
        "model": ("Llama", "Phi, head bias"),
        "loss": ("rloo", "dapo", "gspo, second pass"),
        "shared": (True, False),
        "passes": (False, True),
        "micro_batch": (1, 4, 8),
        "single_zeros": (False, True),
        "chunk": (None, TILE),
        "checkpointing": (False, True),
    }
    return covering(dimensions)


LEFT_OUT = _left_out()
EXACT = [variant for variant in LEFT_OUT if not variant.is_mixed]
MIXED = [variant for variant in LEFT_OUT if variant.is_mixed]
HALF_PRECISION = [
    Variant(model=model, loss=loss, precision=precision)
    for model in ("Llama", "Gemma3, soft-capped logits")
    for loss in ("rloo", "dapo")
    for precision in ("bf16 weights", "bf16 autocast")
]


def plain_and_shared(variant: Variant) -> dict[str, list[Variant]]:
    """The ways that are measured in half precision."""
    return {
        "plain rows": [variant.but(shared=False)],
        "shared prefix": [variant],
        "shared prefix, in passes": [variant.but(micro_batch=16, chunk=0, passes=True)],
    }


# --- What is measured ---

Family = tuple[str, str, str]  # model, loss, variants


@dataclass(frozen=True)
class Line:
    """A family of variants, and the one that is furthest from where it should be."""

    model: str
    loss: str
    family: str
    variants: int
    worst: float
    bound: float
    name: str  # of the worst variant

    @property
    def holds(self) -> bool:
        """Whether all variants are within the bound; NaN is not."""
        return self.worst <= self.bound


def family_of(variant: Variant) -> Family:
    """Model, algorithm and layout."""
    layout = "shared prefix" if variant.shared else "plain rows"
    if variant.shared and not MODELS[variant.model].shares:
        layout = "shared prefix: falls back"
    layout += ", in passes" if variant.passes else ""
    layout += "" if variant.tokens is None else ", in pieces"
    layout += ", LoRA" if variant.lora else ""
    return variant.model, LOSSES[variant.loss].family, layout


def lines_of(found: Iterable[tuple[Family, Variant, float]], bound: float) -> Iterator[Line]:
    """One line for each family of (family, variant, difference), sorted by model."""
    families: dict[Family, list[tuple[float, str]]] = {}
    for family, variant, value in found:
        families.setdefault(family, []).append((value, str(variant)))
    models = list(MODELS)
    for family in sorted(families, key=lambda f: (models.index(f[0]), f[1:])):
        members = families[family]
        worst, name = max(members, key=lambda m: math.inf if math.isnan(m[0]) else m[0])
        yield Line(*family, len(members), worst, bound, name)


def gradient_difference(variant: Variant) -> float:
    """Relative difference from the definition; see `judged`."""
    return judged(variant, measure(variant))


def judged(variant: Variant, measured: Measured) -> float:
    """Relative difference from the definition; NaN if the layout is not the expected one."""
    if not is_as_expected(variant, measured):
        return math.nan
    return difference(measured.gradient, reference(variant))


def dropped_difference(variant: Variant) -> float:
    """What leaving rows out changes; NaN if none were left out.

    Returns:
        The relative difference where forwards become smaller, else the largest absolute one.
    """
    kept, dropped = measure(variant.but(skip=False)), measure(variant)
    if dropped.tokens >= kept.tokens or not is_as_expected(variant, dropped):
        return math.nan
    compared = difference if variant.is_mixed else largest
    return compared(dropped.gradient, kept.gradient)


def contribution(variant: Variant, with_signal: bool = False) -> float:
    """Largest entry of what rows without (or with) an advantage add to the gradient."""
    silent = {"single_zeros": variant.single_zeros, "with_signal": not with_signal}
    prepare = partial(silence, loss=variant.loss, **silent)
    measured = measure(variant.but(skip=False), prepare)
    return float(measured.gradient.abs().max())


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((one - other).abs().max())


def float32_lines() -> Iterator[Line]:
    """The gradients in float32."""
    found = ((family_of(v), v, gradient_difference(v)) for v in VARIANTS + OF_OTHERS)
    return lines_of(found, BOUND)


def statistics_lines() -> Iterator[Line]:
    """Losses that read statistics of a round: however it is cut, they are those of the round."""
    families = ((v.model, v.loss, family_of(v)[2]) for v in OF_STATISTICS)
    measured = map(gradient_difference, OF_STATISTICS)
    return lines_of(zip(families, OF_STATISTICS, measured, strict=True), BOUND)


def supervised_lines() -> Iterator[Line]:
    """Supervised fine-tuning."""
    found = ((v.family, v, supervised.difference(v)) for v in supervised.VARIANTS)
    return lines_of(found, BOUND)


def preference_lines() -> Iterator[Line]:
    """KTO and reward models."""
    found = ((v.family, v, preferences.difference(v)) for v in preferences.VARIANTS)
    return lines_of(found, BOUND)


def dropped_lines() -> Iterator[Line]:
    """Rows of zero advantage, computed and left out."""
    for words, variants, measured, bound in (
        ("whole micro-batches left out", EXACT, dropped_difference, 0.0),
        ("what rows of mixed ones add", MIXED, contribution, 0.0),
        ("rows of mixed ones left out", MIXED, dropped_difference, BOUND),
    ):
        found = (((v.model, LOSSES[v.loss].family, words), v, measured(v)) for v in variants)
        yield from lines_of(found, bound)


def rank_lines(found: dict) -> Iterator[Line]:
    """Two processes; `found` has their gradients."""
    near = [(v, difference(found[v], reference(v))) for v in ON_TWO + ON_ENGINES]
    same = [(v, largest(found[v], found[v.but(skip=False)])) for v in EXACT_ON_TWO]
    for values, words, bound in ((near, "", BOUND), (same, ", rows left out", 0.0)):
        named = (
            ((v.model, v.loss, f"2 processes, {v.engine}{words}"), v, value) for v, value in values
        )
        yield from lines_of(named, bound)


def half_precision_lines() -> Iterator[Line]:
    """bfloat16, against float32; the bound follows from single rows in bfloat16."""
    for variant in HALF_PRECISION:
        own = difference(reference_in(variant), reference(variant))
        words = f"{variant.precision}, single rows"
        yield Line(variant.model, variant.loss, words, 1, own, HALF_PRECISION_FACTOR * own, words)
        for layout, members in plain_and_shared(variant).items():
            family = (variant.model, variant.loss, f"{variant.precision}, {layout}")
            found = [(family, v, gradient_difference(v)) for v in members]
            yield from lines_of(found, HALF_PRECISION_FACTOR * own)


def all_curves(found: dict) -> dict[str, dict[str, torch.Tensor]]:
    """Loss curves by optimizer and class; `found` has those of two processes."""
    return {
        optimizer: {
            name: found[name, optimizer] if CLASSES[name].ranks == 2 else curve(name, optimizer)
            for name in CLASSES
        }
        for optimizer in OPTIMIZERS
    }


def trajectory_lines(curves: dict[str, dict[str, torch.Tensor]]) -> Iterator[Line]:
    """Pairs of loss curves."""
    for optimizer, members in curves.items():
        deviation, residual, pair = compare(members)
        count = len(members) * (len(members) - 1) // 2
        name = f"{STEPS} or {STEPS_ON_ENGINES} updates, {optimizer}"
        yield Line("Llama", name, "largest deviation", count, deviation, DEVIATION, pair)
        yield Line("Llama", name, "mean residual", count, residual, RESIDUAL, "")


# --- The report ---

Sections = dict[str, list[Line]]

SECTIONS = {
    "float32": "Gradients in float32: ||g - g_ref|| / ||g_ref||",
    "supervised": "Supervised fine-tuning: gradients as above, and losses",
    "preferences": "DPO, KTO and reward models: gradients as above, and losses",
    "statistics": "Options that read statistics of a round: gradients as above",
    "dropped": "Rows of zero advantage",
    "ranks": "Two processes",
    "bf16": f"bfloat16 against float32; bound: {HALF_PRECISION_FACTOR} x single rows in bfloat16",
    "curves": "Loss curves in pairs, as shares of their range",
}
HEADER = ("model", "loss", "variants", "number", "worst", "bound", "verdict")


def table(lines: Iterable[Line]) -> str:
    """A Markdown table."""
    rows = [
        (
            line.model,
            line.loss,
            line.family,
            str(line.variants),
            f"{line.worst:.1e}" if line.worst else "0",
            f"{line.bound:.1e}" if line.bound else "0",
            "holds" if line.holds else "BROKEN",
        )
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    marks = tuple("-" * width for width in widths)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (HEADER, marks, *rows)
    )


def report(sections: Sections, seconds: float) -> str:
    """The whole page."""
    lines = [line for section in sections.values() for line in section]
    broken = [line for line in lines if not line.holds]
    text = [
        "# Certificate of invariance",
        "",
        "One scripted rollout (4 prompts of different lengths, 16 completions), and the gradient",
        "of one update of the real trainers, compared with a reference that scores one row at a",
        "time, without padding, from full logits, and computes the losses in loops. Variants",
        "combine layout, micro-batch, accumulation, generation rounds, logits held at once,",
        "passes, amount and content of padding (padding token, end token, random tokens),",
        "row order, rows left out, checkpointing, adapters and logging: every pair of values, and",
        "a random sample.",
        "",
        "- In passes: packed rows longer than 2,048 tokens are cut into several passes, with",
        f"  gradient checkpointing; here from {SHORTEST_PASS} tokens on.",
        "- Padding: shared rows have none. Plain rows are padded on the right, after their",
        "  completions, whatever the padding side of the tokenizer, so the side is not varied.",
        "  What an engine writes after the end token is cut off before rows are formed; the",
        "  variants put random tokens there and into the padding.",
        f"- Supervised fine-tuning: {supervised.ROWS} documents in one update, over micro-batches,",
        "  packs, token budgets, padding, order, logits held at once, checkpointing.",
        "- Online DPO: the first two completions of each prompt. PPO: all of them, with values",
        "  from a layer on the policy or from a classifier, which is trained too.",
        "- KTO and reward models: 8 labelled answers, 6 pairs or 3 rankings in one update.",
        "- In chunks: micro-batches are split into forwards of few tokens (max_tokens_per_piece).",
        "  Statistics of a round or step (high entropies, spreads, ranks of pairs, the KL",
        "  estimate) must depend neither on chunks nor on micro-batches.",
        "- Rows left out: their contribution to the gradient, in forwards with other rows, is",
        "  measured with the contribution of all other rows removed.",
        "",
        f"`make invariance`, {time.strftime('%Y-%m-%d')}: Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{os.cpu_count()} cores at a load of {os.getloadavg()[0]:.0f}, {seconds:.0f} s "
        f"({time.process_time():.0f} s of processor time in the first of its processes).",
    ]
    for key, members in sections.items():
        text += ["", f"## {SECTIONS[key]}", "", table(members)]
    total = sum(line.variants for line in lines)
    text += ["", f"{total} variants, {len(broken)} of {len(lines)} bounds broken."]
    text += [f"BROKEN: {line.name}: {line.worst:.2e} > {line.bound:.2e}" for line in broken]
    return "\n".join(text) + "\n"


def run() -> Sections:
    """Measure everything; two processes run beside the rest."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    gc.freeze()  # each training run collects garbage, which should not look at libraries
    in_background = ThreadPoolExecutor(1).submit(lambda: result(start()))
    sections = {
        "float32": list(float32_lines()),
        "supervised": list(supervised_lines()),
        "preferences": list(preference_lines()),
        "statistics": list(statistics_lines()),
        "dropped": list(dropped_lines()),
        "bf16": list(half_precision_lines()),
    }
    found = in_background.result()
    sections["ranks"] = list(rank_lines(found))
    sections["curves"] = list(trajectory_lines(all_curves(found)))
    return {key: sections[key] for key in SECTIONS}


def main(words: list[str] | None = None, measure_all: Callable[[], Sections] = run) -> int:
    """Print the report; return 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the report here")
    arguments = parser.parse_args(words)
    started = time.perf_counter()
    sections = measure_all()
    text = report(sections, time.perf_counter() - started)
    print(text, end="")
    if arguments.write is not None:
        arguments.write.write_text(text, encoding="utf-8")
    return int(not all(line.holds for section in sections.values() for line in section))


if __name__ == "__main__":
    sys.exit(main())
