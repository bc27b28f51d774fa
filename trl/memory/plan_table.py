"""A memory plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from .plan import HEADROOM, Plan
from .shares import Parts

HEADINGS = {"kv_cache": "KV cache", "vllm": "vLLM"}
NAMES = [field.name for field in fields(Parts)]


def render(plan: Plan) -> str:
    """Write the plan as tables of plain text, for a terminal or a file."""
    blocks = [_header(plan), _phases(plan), _verdict(plan), _limits(plan), _changes(plan)]
    return "\n\n".join(blocks)


def size(count: float) -> str:
    """Bytes with three digits and a decimal unit: 0 B, 83.1 MB, 1.76 GB."""
    if abs(count) < 1e6:
        return f"{count / 1e3:.3g} kB" if count else "0"
    if abs(count) < 999.5e6:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:.3g} GB" if abs(count) < 999.5e9 else f"{count / 1e12:.3g} TB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _header(plan: Plan) -> str:
    model, run = plan.model, plan.run
    trained = "" if not model.frozen else f", of which {_count(model.trainable)} are trained"
    precision = f"{8 * run.weight_bytes}-bit weights"
    if run.autocast:
        precision += f", {8 * run.product_bytes}-bit autocast"
    return (
        f"Model: {_count(model.parameters)} parameters{trained}; {precision}; {run.optimizer}\n"
        f"Round on a rank: {run.rows} completions of up to {run.completion} tokens, "
        f"{run.group_size} for each prompt of up to {run.prompt} tokens\n"
        f"Micro-batch: {run.micro_batch} completions, "
        f"{sum(run.forward_passes(cuts=False))} tokens in one forward"
        f"{_ranks(plan)}"
    )


def _ranks(plan: Plan) -> str:
    """How the model is divided, and what of it is on the host."""
    sharding, host = plan.run.sharding, plan.estimate.shares.host
    if plan.run.processes == 1:
        return ""
    words = f"\nRanks: {plan.run.processes}, {sharding.name}"
    if sharding.stage and sharding.ranks < plan.run.processes:
        words += f"; each {sharding.ranks} of them hold one copy"
    return words + (f"; {size(host)} of each in the memory of the host" if host else "")


def _count(parameters: int) -> str:
    scale, unit = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / scale:.3g} {unit}"


def _phases(plan: Plan) -> str:
    phases = plan.estimate.phases
    used = [name for name in NAMES if any(getattr(parts, name) for parts in phases.values())]
    rows = [["held at the peak of", *(HEADINGS.get(name, name) for name in used), "total"]]
    for phase, parts in phases.items():
        rows.append([phase, *(size(getattr(parts, name)) for name in used), size(parts.total)])
    return table(rows)


def _verdict(plan: Plan) -> str:
    peak, phases = plan.estimate.peak, plan.estimate.phases
    phase = max(phases, key=lambda name: phases[name].total)
    room = f"{size(plan.budget)} of a device of {size(plan.device_bytes)}"
    end = f"fits {room}" if plan.fits else f"does not fit {room}"
    return f"Peak: {size(peak)}, in {phase}; {end} ({HEADROOM:.0%} are left free)."


def _limits(plan: Plan) -> str:
    rows = [["largest value that fits, all else as it is", "now", "largest"]]
    for limit in plan.limits():
        found = "none fits" if limit.largest is None else str(limit.largest)
        words = f" ({limit.words})" if limit.largest == limit.bound else ""
        rows.append([limit.option, str(limit.now), found + words])
    return table(rows)


def _changes(plan: Plan) -> str:
    phases = plan.estimate.phases
    rows = [["what another value would change", "peak", *phases, ""]]
    for change in plan.changes():
        cells = [_difference(change.peak - plan.estimate.peak)]
        for name, parts in phases.items():
            other = change.phases.get(name)
            cells.append("gone" if other is None else _difference(other - parts.total))
        rows.append([f"{change.option}={change.value}", *cells, change.note])
    return table(rows)


def _difference(count: float) -> str:
    return "=" if abs(count) < 500 else f"{'+' if count > 0 else '-'}{size(abs(count))}"
