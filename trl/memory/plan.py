"""The memory plan of a run: what fits a device, and which option saves what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .estimate import Estimate
from .model_size import ModelSize
from .settings import RunSettings

HEADROOM = 0.1  # share of a device left to its driver, to fragments and to the plan's own error
MOST = 2**20  # tokens: no longer sequence is looked for
MOST_IN_GROUP = 2**14


@dataclass(frozen=True)
class Change:
    """Another value of one option, and what it would make of each phase.

    Args:
        option (`str`): name of the option.
        value (`str`): the other value.
        phases (`dict[str, float]`): bytes of each phase with it.
        note (`str`): what it costs or needs.
    """

    option: str
    value: str
    phases: dict[str, float]
    note: str = ""

    @property
    def peak(self) -> float:
        """Bytes of the largest phase with it."""
        return max(self.phases.values())


@dataclass(frozen=True)
class Limit:
    """The largest value of an option that fits a device.

    Args:
        option (`str`): its name.
        now (`int`): the value planned.
        largest (`int`, *optional*): None: not even the smallest fits.
        bound (`int`): the largest value that was tried.
        words (`str`): what that bound is.
    """

    option: str
    now: int
    largest: int | None
    bound: int
    words: str


@dataclass(frozen=True)
class Plan:
    """How a run spends memory, and what would fit.

    Args:
        model (`ModelSize`): what is trained.
        run (`RunSettings`): how.
        device_bytes (`float`): memory of one device.
        adapter (`ModelSize`, *optional*): the model with an adapter, to say what that would save.
    """

    model: ModelSize
    run: RunSettings
    device_bytes: float
    adapter: ModelSize | None = None

    @property
    def estimate(self) -> Estimate:
        """Bytes of each phase."""
        return Estimate(self.model, self.run)

    @property
    def budget(self) -> float:
        """Bytes of the device that the plan may fill."""
        return (1 - HEADROOM) * self.device_bytes

    @property
    def fits(self) -> bool:
        """Whether the largest phase fits the device."""
        return self.fits_with(self.run)

    def fits_with(self, run: RunSettings) -> bool:
        """Whether other settings fit the device."""
        return Estimate(self.model, run).peak <= self.budget

    def limits(self) -> list[Limit]:
        """The largest value of four options that fits while the others stay as they are."""
        run, context = self.run, self.model.context or MOST
        return [
            self._largest_group(),
            self._longest("prompt", "tokens of a prompt", context - run.completion),
            self._longest("completion", "max_completion_length", context - run.prompt),
            self._largest_micro_batch(),
        ]

    def _largest_group(self) -> Limit:
        """Whole micro-batches hold the groups of as many prompts as now."""
        run = self.run
        prompts = max(1, run.rows // run.group_size)
        sizes = group_sizes(run.micro_batch, prompts)
        place = largest_fitting(
            lambda place: self.fits_with(with_group_size(run, sizes[place], prompts)),
            range(len(sizes)),
            bisect_right(sizes, run.group_size) - 1,
        )
        found = None if place is None else sizes[place]
        return Limit("num_generations", run.group_size, found, sizes[-1], "no limit")

    def _longest(self, field: str, option: str, most: int) -> Limit:
        found = largest_fitting(
            lambda count: self.fits_with(self.run.replace(**{field: count})),
            range(1, max(1, most) + 1),
            getattr(self.run, field),
        )
        bound = "no limit" if self.model.context is None else "the model's context"
        return Limit(option, getattr(self.run, field), found, most, bound)

    def _largest_micro_batch(self) -> Limit:
        """A divisor of the round, so that the gradient stays the same."""
        run = self.run
        sizes = [size for size in range(1, run.rows + 1) if run.rows % size == 0]
        place = largest_fitting(
            lambda place: self.fits_with(with_micro_batch(run, sizes[place])), range(len(sizes))
        )
        found = None if place is None else sizes[place]
        option = "per_device_train_batch_size"
        return Limit(option, run.micro_batch, found, run.rows, "the whole round")

    def changes(self) -> list[Change]:
        """What other values of the options that save memory would make of each phase."""
        found = [
            Change(option, value, _totals(Estimate(model, run)), note)
            for option, value, model, run, note in self._alternatives()
        ]
        return sorted(found, key=lambda change: change.peak)

    def _alternatives(self) -> Iterator[tuple[str, str, ModelSize, RunSettings, str]]:
        model, run = self.model, self.run
        yield (
            "gradient_checkpointing",
            _word(not run.gradient_checkpointing),
            model,
            run.replace(gradient_checkpointing=not run.gradient_checkpointing),
            "" if run.gradient_checkpointing else "about a third more time",
        )
        sharing = run.replace(shared_prefix=not run.shared_prefix)
        yield "shared_prefix", _word(not run.shared_prefix), model, sharing, ""
        chunked = run.logits_chunk != 0
        bounded = run.replace(logits_chunk=0 if chunked else None)
        yield "logits_chunk_size", "0" if chunked else "none", model, bounded, ""
        if run.micro_batch > 1:
            smaller = with_micro_batch(run, 1)
            yield "per_device_train_batch_size", "1", model, smaller, "same gradient, more passes"
        if run.generation_rows is None and run.rows > run.group_size:
            rows = run.replace(generation_rows=run.group_size)
            yield "generation_max_rows", str(run.group_size), model, rows, "more passes"
        yield from self._other_runs()

    def _other_runs(self) -> Iterator[tuple[str, str, ModelSize, RunSettings, str]]:
        """Changes after which something else is trained, or in another precision."""
        model, run = self.model, self.run
        if run.reference:
            free = run.replace(reference=False, scores_policy=not run.is_on_policy)
            yield "beta", "0", model, free, "no KL penalty"
        if run.weight_bytes == 4:
            half = run.replace(weight_bytes=2, product_bytes=2)
            yield "dtype", "bfloat16", model, half, "small updates are rounded away"
        if run.optimizer.startswith("adamw_torch"):
            small = run.replace(optimizer="adamw_8bit")
            yield "optim", "adamw_8bit", model, small, "needs bitsandbytes"
        if self.adapter is not None:
            yield "use_peft", "true", self.adapter, run, "trains an adapter"
        yield from self._other_engines()

    def _other_engines(self) -> Iterator[tuple[str, str, ModelSize, RunSettings, str]]:
        """Other ways for ranks to divide the model."""
        model, run = self.model, self.run
        sharding = run.sharding
        if sharding.divides_weights and run.engine_bytes is None:
            other = run.replace(gathers=not run.gathers)
            note = "each token gathers all weights" if run.gathers else ""
            yield "ds3_gather_for_generation", _word(not run.gathers), model, other, note
        for stage in {1, 2, 3} - {sharding.stage}:
            if run.processes > 1 and not sharding.is_fsdp:
                yield (
                    "accelerate_config",
                    f"zero{stage}",
                    model,
                    _zero(run, stage),
                    "needs deepspeed",
                )
        yield from self._offloaded()

    def _offloaded(self) -> Iterator[tuple[str, str, ModelSize, RunSettings, str]]:
        """What the memory of the host could hold."""
        model, run = self.model, self.run
        sharding = run.sharding
        if sharding.is_zero and not sharding.offloads_optimizer:
            other = run.replace(sharding=sharding.replace(offloads_optimizer=True))
            yield "offload_optimizer_device", "cpu", model, other, "slower updates"
        if sharding.is_fsdp and not sharding.offloads_weights:
            moved = sharding.replace(offloads_optimizer=True, offloads_weights=True)
            other = run.replace(sharding=moved)
            yield "fsdp_offload_params", "true", model, other, "slower passes and updates"


def _zero(run: RunSettings, stage: int) -> RunSettings:
    """The same run under DeepSpeed, which casts the weights themselves instead of autocasting."""
    sharding = run.sharding.replace(engine="zero", stage=stage, syncs=True)
    if run.autocast:
        run = run.replace(weight_bytes=run.product_bytes, loaded_bytes=run.weight_bytes)
    return run.replace(sharding=sharding)


def _totals(estimate: Estimate) -> dict[str, float]:
    return {name: parts.total for name, parts in estimate.phases.items()}


def _word(value: bool) -> str:
    return str(value).lower()


def group_sizes(micro_batch: int, prompts: int) -> list[int]:
    """Completions of a prompt with which no micro-batch cuts more groups than it must.

    Divisors of the micro-batch, as far as the groups of the prompts fill whole micro-batches, and
    its multiples.
    """
    divisors = range(2, micro_batch)
    whole = [n for n in divisors if micro_batch % n == 0 and prompts * n % micro_batch == 0]
    return whole + [n for n in range(micro_batch, MOST_IN_GROUP + 1, micro_batch) if n > 1]


def with_group_size(run: RunSettings, group_size: int, prompts: int) -> RunSettings:
    """The same prompts a round with another number of completions; micro-batches stay as large."""
    slices = max(1, prompts * group_size // run.micro_batch)
    return _resliced(run.replace(group_size=group_size), run.micro_batch, slices)


def with_micro_batch(run: RunSettings, micro_batch: int) -> RunSettings:
    """The same rounds and updates, cut into micro-batches of another size."""
    return _resliced(run, micro_batch, max(1, run.rows // micro_batch))


def _resliced(run: RunSettings, micro_batch: int, slices: int) -> RunSettings:
    accumulation = max(1, run.accumulation * slices // run.slices)
    return run.replace(micro_batch=micro_batch, slices=slices, accumulation=accumulation)


def largest_fitting(fits: Callable[[int], bool], values: range, now: int = 0) -> int | None:
    """Find the largest value that fits by bisection.

    Args:
        fits: true up to some value, false beyond it. If it is not, a value that fits is found, but
            a larger one may too.
        values (`range`): where to look, in steps of one.
        now (`int`): the search begins here if this is one of the values, and fits.

    Returns:
        `int` or `None`: None if nothing that was tried fits.
    """
    low, high = values.start, values.stop
    if now in values and fits(now):
        low = now
    elif low >= high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
