"""The memory plan of a run: what fits a device, what each option saves, and the plan as text."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from ..number_format import format_bytes
from .estimate import Estimate
from .meter import DeviceMemory
from .model_size import ModelSize
from .settings import RunSettings
from .shares import Parts

HEADROOM = 0.1  # share of a device left to its driver, to fragments and to the plan's own error
MOST = 2**20  # tokens: no longer sequence is looked for
MOST_IN_GROUP = 2**14
NAMES = [field.name for field in fields(Parts)]
HEADINGS = {"kv_cache": "KV cache", "vllm": "vLLM"}
SMALLEST_CACHE = 16 * 2**20
BATCHED_TOKENS = 4096  # that one step of a generation engine computes
BLOCK = 32  # tokens; an engine gives out its cache in blocks

# Option, another value of it, what that sets in `RunSettings`, and what it costs or needs.
Other = tuple[str, Any, dict[str, Any], str]


@dataclass(frozen=True)
class Change:
    """Another value of one option, and what it would make of each phase."""

    option: str
    value: str
    phases: dict[str, float]  # bytes with it
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
    """How a run spends memory, and what would fit."""

    model: ModelSize  # what is trained
    run: RunSettings
    device_bytes: float  # memory of one device
    adapter: ModelSize | None = None  # the model with an adapter, to say what that would save
    notes: tuple[str, ...] = ()  # what it takes for granted or leaves out

    @cached_property
    def estimate(self) -> Estimate:
        return Estimate(self.model, self.run)

    @property
    def budget(self) -> float:
        """Bytes of the device that the plan may fill."""
        return (1 - HEADROOM) * self.device_bytes

    def fits(self, run: RunSettings | None = None) -> bool:
        """Whether the largest phase fits the device, with these settings or others."""
        return Estimate(self.model, run or self.run).peak <= self.budget

    def limits(self) -> list[Limit]:
        """The largest value of some options that fits while the others stay as they are."""
        run, context = self.run, self.model.context or MOST
        bound = "no limit" if self.model.context is None else "the model's context"
        # Divisors of the round leave the gradient as it is.
        each = 1 if run.generates else run.group_size  # rows of an example
        rows = self._limit(
            "per_device_train_batch_size",
            run.micro_batch // each,
            [n for n in range(1, run.rows // each + 1) if run.rows % (n * each) == 0],
            "the whole round" if run.generates else "all rows of an update",
            lambda n: resized(run, micro_batch=n * each),
        )
        if not run.generates:
            now, lengths = run.prompt + run.completion, range(2, max(2, context) + 1)
            return [self._limit("max_length", now, lengths, bound, run.of_length), rows]

        def by(field: str) -> Callable[[int], RunSettings]:
            return lambda n: resized(run, **{field: n})

        lengths, others = (range(1, max(1, context - n) + 1) for n in (run.completion, run.prompt))
        groups = group_sizes(run.micro_batch, max(1, run.rows // run.group_size))
        return [
            self._limit("num_generations", run.group_size, groups, "no limit", by("group_size")),
            self._limit("tokens of a prompt", run.prompt, lengths, bound, by("prompt")),
            self._limit("max_completion_length", run.completion, others, bound, by("completion")),
            rows,
        ]

    def _limit(
        self,
        option: str,
        now: int,
        values: Sequence[int],
        words: str,
        changed: Callable[[int], RunSettings],
    ) -> Limit:
        """The largest of some rising values of an option with which the run fits."""
        found = largest_fitting(lambda value: self.fits(changed(value)), values, now)
        return Limit(option, now, found, f" ({words})" if found == values[-1] else "")

    def changes(self) -> list[Change]:
        """What other values of the options that save memory would make of each phase."""
        found = [
            (self.model, option, value, self.run.replace(**changed), note)
            for others in (_savings, _other_runs, _other_engines, _other_places)
            for option, value, changed, note in others(self.run)
        ]
        if self.adapter is not None:
            found.append((self.adapter, "use_peft", True, self.run, "trains an adapter"))
        changes = [
            Change(option, str(value).lower(), Estimate(model, run).totals, note)
            for model, option, value, run, note in found
        ]
        return sorted(changes, key=lambda change: change.peak)


def _savings(run: RunSettings) -> Iterator[Other]:
    """Changes that leave the results of the computation the same."""
    other, least = not run.gradient_checkpointing, 1 if run.generates else run.group_size
    slower = "about a third more time" if other else ""
    yield "gradient_checkpointing", other, {"gradient_checkpointing": other}, slower
    if run.group_size > 1:
        yield "shared_prefix", not run.shared_prefix, {"shared_prefix": not run.shared_prefix}, ""
    value, chunk = ("none", None) if run.logits_chunk == 0 else ("0", 0)
    yield "logits_chunk_size", value, {"logits_chunk": chunk}, ""
    if run.micro_batch > least:
        split = vars(resized(run, micro_batch=least))
        yield "per_device_train_batch_size", 1, split, "same gradient, more passes"
    if run.generates and run.generation_rows is None and run.rows > run.group_size:
        group = run.group_size
        yield "generation_max_rows", group, {"generation_rows": group}, "more passes"


def _other_runs(run: RunSettings) -> Iterator[Other]:
    """Changes that train something else, or in another precision."""
    if run.generates and run.reference:
        unscored = {"reference": False, "scores_policy": run.scores_policy and not run.is_on_policy}
        yield "beta", 0, unscored, "no KL penalty"
    if run.weight_bytes == 4:
        half = {"weight_bytes": 2, "product_bytes": 2}
        yield "dtype", "bfloat16", half, "small updates are rounded away"
    if run.optimizer.startswith("adamw_torch"):
        yield "optim", "adamw_8bit", {"optimizer": "adamw_8bit"}, "needs bitsandbytes"


def _other_engines(run: RunSettings) -> Iterator[Other]:
    """Other ways for ranks to divide the model."""
    sharding, gathers = run.sharding, run.gathers
    if run.generates and sharding.divides_weights and run.engine_bytes is None:
        note = "each token gathers all weights" if gathers else ""
        yield "ds3_gather_for_generation", not gathers, {"gathers": not gathers}, note
    if run.processes > 1 and not sharding.is_fsdp:
        # DeepSpeed casts the weights themselves instead of autocasting.
        cast = {"weight_bytes": run.product_bytes, "loaded_bytes": run.weight_bytes}
        for stage in {1, 2, 3} - {sharding.stage}:
            zero = {"sharding": replace(sharding, engine="zero", stage=stage, syncs=True)}
            changed = (cast | zero) if run.autocast else zero
            yield "accelerate_config", f"zero{stage}", changed, "needs deepspeed"


def _other_places(run: RunSettings) -> Iterator[Other]:
    """What the memory of the host could hold."""
    sharding = run.sharding
    if sharding.is_zero and not sharding.offloads_optimizer:
        states = {"sharding": replace(sharding, offloads_optimizer=True)}
        yield "offload_optimizer_device", "cpu", states, "slower updates"
    if sharding.is_fsdp and not sharding.offloads_weights:
        everything = replace(sharding, offloads_optimizer=True, offloads_weights=True)
        yield "fsdp_offload_params", True, {"sharding": everything}, "slower passes and updates"


def group_sizes(micro_batch: int, prompts: int) -> list[int]:
    """Completions of a prompt with which no micro-batch cuts more groups than it must."""
    divisors = range(2, micro_batch)
    whole = [n for n in divisors if micro_batch % n == 0 and prompts * n % micro_batch == 0]
    return whole + [n for n in range(micro_batch, MOST_IN_GROUP + 1, micro_batch) if n > 1]


def resized(run: RunSettings, **changes: int) -> RunSettings:
    """The same prompts in each round and update, with rows, groups or micro-batches changed."""
    other = run.replace(**changes)
    rows = run.rows * other.group_size // run.group_size
    slices = max(1, rows // other.micro_batch)
    accumulation = max(1, run.accumulation * slices // run.slices)
    return other.replace(slices=slices, accumulation=accumulation)


def largest_fitting(fits: Callable[[int], bool], values: Sequence[int], now: int = 0) -> int | None:
    """Find the largest of rising values that fits, or None; bisect from `now` if that fits."""
    start = bisect_left(values, now) if now in values and fits(now) else 0
    beyond = bisect_left(values, True, lo=start, key=lambda value: not fits(value))
    return values[beyond - 1] if beyond else None


# --- Text ---


def render(plan: Plan) -> str:
    """Write the plan as tables of plain text, for a terminal or a file."""
    blocks = [block(plan) for block in (_header, _phases, _verdict, _limits, _changes)]
    return "\n\n".join([*blocks, *filter(None, ["\n".join(f"Note: {x}" for x in plan.notes)])])


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
    lines = [f"Model: {_count(model.parameters)} parameters{trained}; {precision}; {run.optimizer}"]
    if run.generates:
        lines.append(
            f"Round per rank: {run.rows} completions of up to {run.completion} tokens, "
            f"{run.group_size} for each prompt of up to {run.prompt} tokens"
        )
    what = "completions" if run.generates else f"rows of up to {run.prompt + run.completion} tokens"
    tokens, every = sum(run.forward_passes(cuts=False)), run.sharding.per_row
    each = "" if every == 1 else " of each rank"
    lines.append(f"Micro-batch: {run.micro_batch} {what}, {tokens} tokens{each} in one forward")
    return "\n".join(lines) + _ranks(plan)


def _ranks(plan: Plan) -> str:
    sharding, host = plan.run.sharding, plan.estimate.shares.host
    if plan.run.processes == 1:
        return ""
    words = f"\nRanks: {plan.run.processes}, {sharding.name}"
    if sharding.stage and sharding.ranks < plan.run.processes:
        words += f"; every {sharding.ranks} of them hold one copy"
    if sharding.per_row > 1:
        words += f"; every {sharding.per_row} of them divide the tokens of a row"
    return words + (f"; {format_bytes(host)} of each rank in host memory" if host else "")


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def _phases(plan: Plan) -> str:
    phases = plan.estimate.phases
    used = [name for name in NAMES if any(getattr(parts, name) for parts in phases.values())]
    rows = [["held at the peak of", *(HEADINGS.get(name, name) for name in used), "total"]]
    for phase, parts in phases.items():
        rows.append(
            [
                phase,
                *(format_bytes(getattr(parts, name)) for name in used),
                format_bytes(parts.total),
            ]
        )
    return table(rows)


def _verdict(plan: Plan) -> str:
    peak, totals = plan.estimate.peak, plan.estimate.totals
    phase = max(totals, key=totals.__getitem__)
    room = f"{format_bytes(plan.budget)} of a device of {format_bytes(plan.device_bytes)}"
    end = f"fits in {room}" if plan.fits() else f"does not fit in {room}"
    return f"Peak: {format_bytes(peak)}, in {phase}; {end} ({HEADROOM:.0%} is left free)."


def _limits(plan: Plan) -> str:
    rows = [["largest value that fits, all else as it is", "now", "largest"]]
    for limit in plan.limits():
        found = "none fits" if limit.largest is None else str(limit.largest)
        rows.append([limit.option, str(limit.now), found + limit.note])
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


def _difference(count: float) -> str:
    return "=" if abs(count) < 500 else f"{'+' if count > 0 else '-'}{format_bytes(abs(count))}"


# --- An engine that generates on the device of training ---


@dataclass(frozen=True)
class EngineMemory:
    """What an engine is given."""

    cache: int  # bytes for keys and values
    context: int  # most tokens of one prompt with its completion that they hold
    total: float  # bytes with weights and working memory


@dataclass(frozen=True)
class Engine:
    """An engine beside training; sizes are bytes of one rank."""

    plan: Plan  # of the training run; an engine that it counts is left out here
    ranks: int  # that divide its weights and its cache among them
    context: int  # most tokens of one prompt with its completion
    rows: int  # completions that decode together
    sleeps: bool  # it gives its memory back outside generation

    @property
    def weights(self) -> float:
        """Its own copy; an adapter is merged, or kept apart with room for as much again."""
        model = self.plan.model
        return self.plan.run.product_bytes * (model.parameters + model.adapter) / self.ranks

    @property
    def token(self) -> float:
        """Keys and values of one token in all layers."""
        model = self.plan.model
        return 2 * self.plan.run.product_bytes * model.keys * model.layers / self.ranks

    @property
    def working(self) -> float:
        """Activations of one step, and logits in float32 with what sampling adds."""
        model = self.plan.model
        activations = BATCHED_TOKENS * (4 * model.hidden + 3 * model.intermediate)
        return self.plan.run.product_bytes * activations + 4 * 3 * self.rows * model.vocabulary

    def memory(self, shortest: int, measured: DeviceMemory | None = None) -> EngineMemory:
        """Divide what training leaves of the device between the weights and the cache.

        An engine that sleeps shares the device with what is held in generation alone, another one
        with the largest phase. What is `measured` before the engine is started counts where less
        is free than planned. A context of fewer than `shortest` tokens is a ValueError.
        """
        plan = self.plan
        run = plan.run.replace(engine_bytes=0.0, engine_sleeps=self.sleeps)
        phases = Estimate(plan.model, run).totals
        phase = "generation" if self.sleeps else max(phases, key=phases.__getitem__)
        budget, taken, seen = plan.budget, phases[phase], ""
        if measured is not None:
            budget = min(budget, (1 - HEADROOM) * (measured.free + measured.held))
            taken = max(taken, measured.held)
            seen = (
                f" ({format_bytes(measured.free)} of the device's "
                f"{format_bytes(plan.device_bytes)} are free now, and training holds "
                f"{format_bytes(measured.held)})"
            )
        fixed = self.weights + self.working
        left = budget - taken - fixed
        context = min(self.context, int(left // self.token))
        if context < shortest:
            advice = "Lower max_completion_length"
            advice = advice if self.sleeps else "Set vllm_enable_sleep_mode=True"
            raise ValueError(
                f"The vLLM engine does not fit beside training. Of {format_bytes(budget)} that "
                f"may be filled{seen}, {phase} takes {format_bytes(taken)} and the engine itself "
                f"{format_bytes(fixed)}; a prompt with its completion needs "
                f"{format_bytes(shortest * self.token)} more. {advice}, or "
                "spread the engine over ranks with vllm_tensor_parallel_size, or set "
                "vllm_gpu_memory_utilization to try it anyway."
            )
        blocks = -(-min(self.context, run.prompt + run.completion) // BLOCK)
        # More cache than a round fills would be idle.
        wanted = self.token * max(self.rows * blocks * BLOCK, context)
        cache = max(SMALLEST_CACHE, min(wanted, left))
        return EngineMemory(int(cache), context, fixed + cache)
