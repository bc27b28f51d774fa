"""The memory plan of a run: what fits a device, and which option saves what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .estimate import Estimate
from .model_size import ModelSize
from .settings import RunSettings

HEADROOM = 0.1  # share of a device left to its driver, to fragments and to the plan's own error
MOST = 2**20  # tokens: no longer sequence is looked for
MOST_IN_GROUP = 2**14


@dataclass(frozen=True)
class Change:
    """Another value of one option, and what it would make of each phase."""

    option: str
    value: str
    phases: dict[str, float]  # bytes with it
    note: str = ""  # what it costs or needs

    @property
    def peak(self) -> float:
        """Bytes of the largest phase with it."""
        return max(self.phases.values())


@dataclass(frozen=True)
class Limit:
    """The largest value of an option that fits a device."""

    option: str
    now: int
    largest: int | None  # None: not even the smallest fits
    bound: int  # the largest value that was tried
    words: str  # what that bound is


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
        # Whole micro-batches hold the groups of as many prompts as now.
        prompts = max(1, run.rows // run.group_size)
        sizes = group_sizes(run.micro_batch, prompts)
        start = bisect_right(sizes, run.group_size) - 1
        group = self._largest(sizes, lambda size: with_group_size(run, size, prompts), start)
        # Divisors of the round leave the gradient as it is.
        parts = [size for size in range(1, run.rows + 1) if run.rows % size == 0]
        rows = self._largest(parts, lambda size: with_micro_batch(run, size))
        return [
            Limit("num_generations", run.group_size, group, sizes[-1], "no limit"),
            self._longest("prompt", "tokens of a prompt", context - run.completion),
            self._longest("completion", "max_completion_length", context - run.prompt),
            Limit(
                "per_device_train_batch_size", run.micro_batch, rows, run.rows, "the whole round"
            ),
        ]

    def _longest(self, field: str, option: str, most: int) -> Limit:
        now = getattr(self.run, field)
        lengths = range(1, max(1, most) + 1)
        found = self._largest(lengths, lambda n: self.run.replace(**{field: n}), now - 1)
        bound = "no limit" if self.model.context is None else "the model's context"
        return Limit(option, now, found, most, bound)

    def _largest(
        self, values: range | list[int], change: Callable[[int], RunSettings], start: int = 0
    ) -> int | None:
        """The largest of some rising values with which the run fits."""
        place = largest_fitting(
            lambda place: self.fits_with(change(values[place])), range(len(values)), start
        )
        return None if place is None else values[place]

    def changes(self) -> list[Change]:
        """What other values of the options that save memory would make of each phase."""
        others = [*_savings(self.run), *_other_runs(self.run), *_other_engines(self.run)]
        found = [
            Change(x.option, x.value, _totals(self.model, self.run.replace(**x.fields)), x.note)
            for x in others
            if x.applies
        ]
        if self.adapter is not None:
            phases = _totals(self.adapter, self.run)
            found.append(Change("use_peft", "true", phases, "trains an adapter"))
        return sorted(found, key=lambda change: change.peak)


def _totals(model: ModelSize, run: RunSettings) -> dict[str, float]:
    return {name: parts.total for name, parts in Estimate(model, run).phases.items()}


@dataclass(frozen=True)
class _Other:
    """Another value of an option: what it sets in `RunSettings`, and whether it makes sense."""

    option: str
    value: str
    fields: dict[str, Any]
    note: str = ""
    applies: bool = True


def _savings(run: RunSettings) -> list[_Other]:
    """Changes after which the same is computed."""
    recomputes, shares, chunks = (
        run.gradient_checkpointing,
        run.shared_prefix,
        run.logits_chunk != 0,
    )
    slower = "" if recomputes else "about a third more time"
    split = with_micro_batch(run, 1)
    split_fields = {"micro_batch": 1, "slices": split.slices, "accumulation": split.accumulation}
    is_whole = run.generates and run.generation_rows is None and run.rows > run.group_size
    group = {"generation_rows": run.group_size}
    return [
        _Other(
            "gradient_checkpointing",
            _word(not recomputes),
            {"gradient_checkpointing": not recomputes},
            slower,
        ),
        _Other("shared_prefix", _word(not shares), {"shared_prefix": not shares}),
        _Other(
            "logits_chunk_size", "0" if chunks else "none", {"logits_chunk": 0 if chunks else None}
        ),
        _Other(
            "per_device_train_batch_size",
            "1",
            split_fields,
            "same gradient, more passes",
            applies=run.micro_batch > 1,
        ),
        _Other("generation_max_rows", str(run.group_size), group, "more passes", applies=is_whole),
    ]


def _other_runs(run: RunSettings) -> list[_Other]:
    """Changes after which something else is trained, or in another precision."""
    unscored = {"reference": False, "scores_policy": run.scores_policy and not run.is_on_policy}
    half = {"weight_bytes": 2, "product_bytes": 2}
    rounded = "small updates are rounded away"
    small = {"optimizer": "adamw_8bit"}
    is_adam = run.optimizer.startswith("adamw_torch")
    return [
        _Other("beta", "0", unscored, "no KL penalty", applies=run.reference),
        _Other("dtype", "bfloat16", half, rounded, applies=run.weight_bytes == 4),
        _Other("optim", "adamw_8bit", small, "needs bitsandbytes", applies=is_adam),
    ]


def _other_engines(run: RunSettings) -> list[_Other]:
    """Other ways for ranks to divide the model, and what the memory of the host could hold."""
    sharding = run.sharding
    found = [
        _Other(
            "ds3_gather_for_generation",
            _word(not run.gathers),
            {"gathers": not run.gathers},
            "each token gathers all weights" if run.gathers else "",
            applies=run.generates and sharding.divides_weights and run.engine_bytes is None,
        )
    ]
    # DeepSpeed casts the weights themselves instead of autocasting.
    cast = {"weight_bytes": run.product_bytes, "loaded_bytes": run.weight_bytes}
    can_change = run.processes > 1 and not sharding.is_fsdp
    for stage in {1, 2, 3} - {sharding.stage}:
        zero = {"sharding": sharding.replace(engine="zero", stage=stage, syncs=True)}
        fields = (cast | zero) if run.autocast else zero
        config = f"zero{stage}"
        note = "needs deepspeed"
        found.append(_Other("accelerate_config", config, fields, note, applies=can_change))
    states = {"sharding": sharding.replace(offloads_optimizer=True)}
    moves = sharding.is_zero and not sharding.offloads_optimizer
    weights = {"sharding": sharding.replace(offloads_optimizer=True, offloads_weights=True)}
    slower = "slower passes and updates"
    can_offload = sharding.is_fsdp and not sharding.offloads_weights
    return [
        *found,
        _Other("offload_optimizer_device", "cpu", states, "slower updates", applies=moves),
        _Other("fsdp_offload_params", "true", weights, slower, applies=can_offload),
    ]


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
