"""The memory plan of a run: what fits a device, what other option values save, as text."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..number_format import format_bytes
from .estimate import Estimate
from .model_size import ModelSize
from .rank_memory import MemoryUse
from .settings import RunSettings

HEADROOM = 0.1  # fraction of a device left for its driver, fragmentation and error of the plan
MOST = 2**20  # tokens; longer sequences are not tried
MOST_IN_GROUP = 2**14
NAMES = [field.name for field in fields(MemoryUse)]
HEADINGS = {"kv_cache": "KV cache", "vllm": "vLLM"}


class Alternative(NamedTuple):
    """Another value of an option."""

    option: str
    value: object
    settings: dict[str, Any]  # the fields of `RunSettings` that it changes
    note: str = ""  # what it costs or needs


@dataclass(frozen=True)
class Change:
    """Another value of an option, and the memory of each phase with it."""

    option: str
    value: str
    phases: dict[str, float]  # bytes
    note: str = ""  # what it costs or needs

    @property
    def peak(self) -> float:
        return max(self.phases.values())


@dataclass(frozen=True)
class Limit:
    """The largest value of an option that fits a device."""

    option: str
    now: int
    largest: int | None  # None: not even the smallest fits
    note: str  # what the bound is, if it is reached


@dataclass(frozen=True)
class Plan:
    """The memory of a run, and what would fit."""

    model: ModelSize  # what is trained
    run: RunSettings
    device_bytes: float  # memory of one device
    adapter: ModelSize | None = None  # the model with an adapter, to show what that would save
    notes: tuple[str, ...] = ()  # assumptions and omissions

    @cached_property
    def estimate(self) -> Estimate:
        return Estimate(self.model, self.run)

    @property
    def budget(self) -> float:
        """Bytes of the device that the plan may fill."""
        return (1 - HEADROOM) * self.device_bytes

    def fits(self, run: RunSettings | None = None) -> bool:
        """Whether the largest phase fits the device, with these or other settings."""
        return Estimate(self.model, run or self.run).peak <= self.budget

    def limits(self) -> list[Limit]:
        """Return the largest value of some options that fits if all others stay the same."""
        run = self.run
        context = self.model.context or MOST
        context_bound = "no limit" if self.model.context is None else "the model's context"
        # Divisors of the rollout batch, which do not change the gradient.
        example_rows = 1 if run.generates else run.group_size
        sizes = range(1, run.rows // example_rows + 1)
        batch_size = self._limit(
            "per_device_train_batch_size",
            run.micro_batch // example_rows,
            [size for size in sizes if run.rows % (size * example_rows) == 0],
            "the whole round" if run.generates else "all rows of an update",
            lambda size: resized(run, micro_batch=size * example_rows),
        )
        if not run.generates:
            length = self._limit(
                "max_length",
                run.prompt + run.completion,
                range(2, max(2, context) + 1),
                context_bound,
                run.of_length,
            )
            return [length, batch_size]
        return [
            self._limit(
                "num_generations",
                run.group_size,
                group_sizes(run.micro_batch, max(1, run.rows // run.group_size)),
                "no limit",
                lambda size: resized(run, group_size=size),
            ),
            self._limit(
                "tokens of a prompt",
                run.prompt,
                range(1, max(1, context - run.completion) + 1),
                context_bound,
                lambda tokens: resized(run, prompt=tokens),
            ),
            self._limit(
                "max_completion_length",
                run.completion,
                range(1, max(1, context - run.prompt) + 1),
                context_bound,
                lambda tokens: resized(run, completion=tokens),
            ),
            batch_size,
        ]

    def _limit(
        self,
        option: str,
        now: int,
        values: Sequence[int],
        bound: str,
        settings: Callable[[int], RunSettings],
    ) -> Limit:
        """Find the largest of increasing values of an option that fits."""
        largest = largest_fitting(lambda value: self.fits(settings(value)), values, now)
        return Limit(option, now, largest, f" ({bound})" if largest == values[-1] else "")

    def changes(self) -> list[Change]:
        """Return what other option values would change, the smallest peak first."""
        changes = [
            self._change(alternative, self.model, self.run.replace(**alternative.settings))
            for alternatives in (_same_results, _other_results, _other_sharding, _offloading)
            for alternative in alternatives(self.run)
        ]
        if self.adapter is not None:
            use_peft = Alternative("use_peft", True, {}, "trains an adapter")
            changes.append(self._change(use_peft, self.adapter, self.run))
        return sorted(changes, key=lambda change: change.peak)

    def _change(self, alternative: Alternative, model: ModelSize, run: RunSettings) -> Change:
        value = str(alternative.value).lower()
        return Change(alternative.option, value, Estimate(model, run).totals, alternative.note)


def _same_results(run: RunSettings) -> Iterator[Alternative]:
    """Alternatives that do not change the results of the computation."""
    checkpoints = not run.gradient_checkpointing
    yield Alternative(
        "gradient_checkpointing",
        checkpoints,
        {"gradient_checkpointing": checkpoints},
        "about a third more time" if checkpoints else "",
    )
    if run.group_size > 1:
        shares = not run.shared_prefix
        yield Alternative("shared_prefix", shares, {"shared_prefix": shares})
    if run.logits_chunk == 0:
        yield Alternative("logits_chunk_size", "none", {"logits_chunk": None})
    else:
        yield Alternative("logits_chunk_size", 0, {"logits_chunk": 0})
    example_rows = 1 if run.generates else run.group_size
    if run.micro_batch > example_rows:
        settings = vars(resized(run, micro_batch=example_rows))
        yield Alternative("per_device_train_batch_size", 1, settings, "same gradient, more passes")
    if run.generates and run.generation_rows is None and run.rows > run.group_size:
        rows = run.group_size
        yield Alternative("generation_max_rows", rows, {"generation_rows": rows}, "more passes")


def _other_results(run: RunSettings) -> Iterator[Alternative]:
    """Alternatives that train something else, or in another precision."""
    if run.generates and run.reference:
        scores_policy = run.scores_policy and not run.is_on_policy
        without_reference = {"reference": False, "scores_policy": scores_policy}
        yield Alternative("beta", 0, without_reference, "no KL penalty")
    if run.weight_bytes == 4:
        half = {"weight_bytes": 2, "product_bytes": 2}
        yield Alternative("dtype", "bfloat16", half, "small updates are rounded away")
    if run.optimizer.startswith("adamw_torch"):
        in_8bit = {"optimizer": "adamw_8bit"}
        yield Alternative("optim", "adamw_8bit", in_8bit, "needs bitsandbytes")


def _other_sharding(run: RunSettings) -> Iterator[Alternative]:
    """Other ways to shard the model."""
    sharding = run.sharding
    if run.generates and sharding.divides_weights and run.engine_bytes is None:
        gathers = not run.gathers
        note = "" if gathers else "each token gathers all weights"
        yield Alternative("ds3_gather_for_generation", gathers, {"gathers": gathers}, note)
    if run.processes > 1 and not sharding.is_fsdp:
        for stage in {1, 2, 3} - {sharding.stage}:
            zero = replace(sharding, engine="zero", stage=stage, syncs=True)
            settings: dict[str, Any] = {"sharding": zero}
            if run.autocast:  # DeepSpeed casts the weights themselves instead
                settings["weight_bytes"] = run.product_bytes
                settings["loaded_bytes"] = run.weight_bytes
            yield Alternative("accelerate_config", f"zero{stage}", settings, "needs deepspeed")


def _offloading(run: RunSettings) -> Iterator[Alternative]:
    """Alternatives that move memory to the host."""
    sharding = run.sharding
    if sharding.is_zero and not sharding.offloads_optimizer:
        settings = {"sharding": replace(sharding, offloads_optimizer=True)}
        yield Alternative("offload_optimizer_device", "cpu", settings, "slower updates")
    if sharding.is_fsdp and not sharding.offloads_weights:
        offloading = replace(sharding, offloads_optimizer=True, offloads_weights=True)
        settings = {"sharding": offloading}
        yield Alternative("fsdp_offload_params", True, settings, "slower passes and updates")


def group_sizes(micro_batch: int, prompts: int) -> list[int]:
    """Return completions per prompt for which micro-batches divide as few groups as possible."""
    divisors = range(2, micro_batch)
    whole = [n for n in divisors if micro_batch % n == 0 and prompts * n % micro_batch == 0]
    return whole + [n for n in range(micro_batch, MOST_IN_GROUP + 1, micro_batch) if n > 1]


def resized(run: RunSettings, **changes: int) -> RunSettings:
    """Change the sizes of groups, rows or micro-batches; keep the prompts per update."""
    other = run.replace(**changes)
    rows = run.rows * other.group_size // run.group_size
    slices = max(1, rows // other.micro_batch)
    accumulation = max(1, run.accumulation * slices // run.slices)
    return other.replace(slices=slices, accumulation=accumulation)


def largest_fitting(fits: Callable[[int], bool], values: Sequence[int], now: int = 0) -> int | None:
    """Find the largest of increasing values that fits, or None; bisect from `now` if that fits."""
    start = bisect_left(values, now) if now in values and fits(now) else 0
    beyond = bisect_left(values, True, lo=start, key=lambda value: not fits(value))
    return values[beyond - 1] if beyond else None


# --- Text ---


def render(plan: Plan) -> str:
    """Write the plan as tables of plain text, for a terminal or a file."""
    blocks = [_header(plan), _phases(plan), _verdict(plan), _limits(plan), _changes(plan)]
    if plan.notes:
        blocks.append("\n".join(f"Note: {note}" for note in plan.notes))
    return "\n\n".join(blocks)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _header(plan: Plan) -> str:
    model = plan.model
    run = plan.run
    trained = "" if not model.frozen else f", of which {_count(model.trainable)} are trained"
    precision = f"{8 * run.weight_bytes}-bit weights"
    if run.autocast:
        precision += f", {8 * run.product_bytes}-bit autocast"
    lines = [f"Model: {_count(model.parameters)} parameters{trained}; {precision}; {run.optimizer}"]
    if run.generates:
        lines.append(
            f"Round per rank: {run.rows} completions of up to {run.completion} tokens, "
            f"{run.group_size} for each prompt of up to {run.prompt} tokens"
        )
        rows = f"{run.micro_batch} completions"
    else:
        rows = f"{run.micro_batch} rows of up to {run.prompt + run.completion} tokens"
    tokens = sum(run.forward_passes(cuts=False))
    of_rank = "" if run.sharding.per_row == 1 else " of each rank"
    lines.append(f"Micro-batch: {rows}, {tokens} tokens{of_rank} in one forward")
    if run.processes > 1:
        lines.append(_ranks(plan))
    return "\n".join(lines)


def _ranks(plan: Plan) -> str:
    sharding = plan.run.sharding
    line = f"Ranks: {plan.run.processes}, {sharding.name}"
    if sharding.stage and sharding.ranks < plan.run.processes:
        line += f"; every {sharding.ranks} of them hold one copy"
    if sharding.per_row > 1:
        line += f"; every {sharding.per_row} of them divide the tokens of a row"
    host = plan.estimate.rank.host
    if host:
        line += f"; {format_bytes(host)} of each rank in host memory"
    return line


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def _phases(plan: Plan) -> str:
    phases = {name: use.by_purpose() for name, use in plan.estimate.phases.items()}
    used = [name for name in NAMES if any(purposes[name] for purposes in phases.values())]
    rows = [["held at the peak of", *(HEADINGS.get(name, name) for name in used), "total"]]
    for phase, purposes in phases.items():
        sizes = [purposes[name] for name in used]
        total = plan.estimate.totals[phase]
        rows.append([phase, *map(format_bytes, sizes), format_bytes(total)])
    return table(rows)


def _verdict(plan: Plan) -> str:
    peak = plan.estimate.peak
    totals = plan.estimate.totals
    phase = max(totals, key=totals.__getitem__)
    room = f"{format_bytes(plan.budget)} of a device of {format_bytes(plan.device_bytes)}"
    end = f"fits in {room}" if plan.fits() else f"does not fit in {room}"
    return f"Peak: {format_bytes(peak)}, in {phase}; {end} ({HEADROOM:.0%} is left free)."


def _limits(plan: Plan) -> str:
    rows = [["largest value that fits, all else as it is", "now", "largest"]]
    for limit in plan.limits():
        largest = "none fits" if limit.largest is None else str(limit.largest)
        rows.append([limit.option, str(limit.now), largest + limit.note])
    return table(rows)


def _changes(plan: Plan) -> str:
    totals = plan.estimate.totals
    rows = [["what another value would change", "peak", *totals, ""]]
    for change in plan.changes():
        cells = [_difference(change.peak - plan.estimate.peak)]
        for name, total in totals.items():
            other = change.phases.get(name)
            cells.append("gone" if other is None else _difference(other - total))
        rows.append([f"{change.option}={change.value}", *cells, change.note])
    return table(rows)


def _difference(size: float) -> str:
    if abs(size) < 500:
        return "="
    sign = "+" if size > 0 else "-"
    return f"{sign}{format_bytes(abs(size))}"
