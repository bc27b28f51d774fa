"""The memory plan of a run: what fits a device, and which option saves what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .estimate import Estimate
from .model_size import ModelSize
from .settings import RunSettings

HEADROOM = 0.1  # share of a device left to its driver, to fragments and to the plan's own error
MOST = 2**20  # no longer sequence, and no larger group, is looked for


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

    def limits(self) -> dict[str, int | None]:
        """The largest value of each of these that fits while the others stay; None: none does."""
        run = self.run
        context = self.model.context or MOST
        prompts = max(1, run.rows // run.group_size)
        step = run.micro_batch // math.gcd(prompts, run.micro_batch)
        groups = largest_fitting(
            lambda count: self.fits_with(with_group_size(run, count * step, prompts)),
            range(math.ceil(2 / step), max(MOST // step, 2)),
        )
        divisors = [size for size in range(1, run.rows + 1) if run.rows % size == 0]
        micro = largest_fitting(
            lambda place: self.fits_with(with_micro_batch(run, divisors[place])),
            range(len(divisors)),
        )
        return {
            "num_generations": None if groups is None else groups * step,
            "prompt tokens": largest_fitting(
                lambda count: self.fits_with(run.replace(prompt=count)),
                range(1, max(2, context - run.completion + 1)),
            ),
            "max_completion_length": largest_fitting(
                lambda count: self.fits_with(run.replace(completion=count)),
                range(1, max(2, context - run.prompt + 1)),
            ),
            "per_device_train_batch_size": None if micro is None else divisors[micro],
        }

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
            free = run.replace(reference=False, scores_policy=False)
            yield "beta", "0", model, free, "no KL penalty"
        if run.weight_bytes == 4:
            half = run.replace(weight_bytes=2, product_bytes=2)
            yield "dtype", "bfloat16", model, half, "small updates are rounded away"
        if run.optimizer.startswith("adamw_torch"):
            small = run.replace(optimizer="adamw_8bit")
            yield "optim", "adamw_8bit", model, small, "needs bitsandbytes"
        if self.adapter is not None:
            yield "use_peft", "true", self.adapter, run, "trains an adapter"


def _totals(estimate: Estimate) -> dict[str, float]:
    return {name: parts.total for name, parts in estimate.phases.items()}


def _word(value: bool) -> str:
    return str(value).lower()


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


def largest_fitting(fits: Callable[[int], bool], values: range) -> int | None:
    """Find the largest value that fits by bisection.

    Args:
        fits: true up to some value, false beyond it.
        values (`range`): where to look, in steps of one.

    Returns:
        `int` or `None`: None if not even the first value fits.
    """
    low, high = values.start, values.stop
    if low >= high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
