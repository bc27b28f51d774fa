"""The arithmetic of batches: what the options mean in sequences, and the nearest legal numbers."""

import math
from dataclasses import dataclass

from ...number_format import pluralize


@dataclass(frozen=True)
class BatchPlan:
    """How one generation round is cut into micro-batches and optimizer steps."""

    micro_batch: int  # rows, on one rank
    num_processes: int  # ranks
    micro_batches: int  # of a round, on each rank
    accumulation: int  # micro-batches of an optimizer step
    group_size: int  # completions of a prompt
    iterations: int  # passes over each round

    @property
    def rows_per_rank(self) -> int:
        return self.micro_batch * self.micro_batches

    @property
    def round_rows(self) -> int:
        return self.rows_per_rank * self.num_processes

    @property
    def update_rows(self) -> int:
        return self.micro_batch * self.num_processes * self.accumulation

    @property
    def micro_steps_per_round(self) -> int:
        return self.micro_batches * self.iterations

    @property
    def is_on_policy(self) -> bool:
        """Whether the weights never move between generating a round and training on it."""
        return self.accumulation % self.micro_steps_per_round == 0

    def rounds_before(self, step: int) -> int:
        """Rounds that are generated before optimizer step `step` begins, if all are used up."""
        return math.ceil(step * self.accumulation / self.micro_steps_per_round)

    def describe(self) -> str:
        """Say in one sentence what an update consists of."""
        rows, group = self.update_rows, self.group_size
        prompts = (
            f"{rows / group:.2f} prompts" if rows % group else pluralize(rows // group, "prompt")
        )
        words = (
            f"each update: {prompts} x {group} completions = {rows} sequences, in "
            f"{pluralize(self.accumulation, 'micro-batch', 'micro-batches')} on "
            f"{pluralize(self.num_processes, 'rank')}"
        )
        if self.micro_batches == self.accumulation and self.iterations == 1:
            return words
        served = self.micro_steps_per_round / self.accumulation
        updates = "1 update" if served == 1 else f"{served:g} updates"
        return f"{words}; each generation round of {self.round_rows} sequences serves {updates}"


def nearest_multiples(value: int, base: int) -> str:
    """Name the multiples of `base` around `value`: "8 or 12", or "4" when there is none below."""
    below = value // base * base
    return f"{below} or {below + base}" if below else str(base)


def nearest_divisors(value: int, wanted: int) -> str:
    """Name the divisors of `value` that are >= 2 and closest to `wanted` from both sides."""
    divisors = [d for d in range(2, value + 1) if value % d == 0]
    below = sum(divisor <= wanted for divisor in divisors)
    return " or ".join(map(str, divisors[max(below - 1, 0) : below + 1]))


def smaller_round(plan: BatchPlan, prompts: int) -> str:
    """Say which options to lower, and to what, so that a round takes few prompts."""
    most = prompts * plan.group_size
    for rows in range(plan.micro_batch, 0, -1):
        step = math.lcm(plan.group_size, rows * plan.num_processes)
        if step <= most:
            batch = f"per_device_train_batch_size to {rows} and " if rows < plan.micro_batch else ""
            return f", or lower {batch}generation_batch_size to {most // step * step}"
    if plan.num_processes == 1:
        return ""
    return f", or lower the number of processes, {plan.num_processes}"


def resolve_rounds(
    micro_rows: int, accumulation: int, round_rows: int | None, micro_batches: int | None
) -> tuple[int, int]:
    """Settle generation_batch_size (`round_rows`) and steps_per_generation (`micro_batches`)."""
    if round_rows is None:
        micro_batches = accumulation if micro_batches is None else micro_batches
        return micro_rows * micro_batches, micro_batches
    if round_rows < 1 or round_rows % micro_rows:
        raise ValueError(
            f"generation_batch_size={round_rows} is not a multiple of the {micro_rows} rows "
            "of a micro-batch (per_device_train_batch_size x number of processes). Nearest legal: "
            f"{nearest_multiples(max(round_rows, 0), micro_rows)}."
        )
    derived = round_rows // micro_rows
    if micro_batches is not None and micro_batches != derived:
        raise ValueError(
            f"generation_batch_size={round_rows} means steps_per_generation={derived} with "
            f"{micro_rows} rows per micro-batch, but steps_per_generation={micro_batches} was "
            f"given. Give one of them, or generation_batch_size={micro_rows * micro_batches}."
        )
    return round_rows, derived


def check_groups(round_rows: int, group_size: int | None, micro_rows: int, least: int = 2) -> None:
    """Check that a generation round holds whole groups of at least `least` completions."""
    if group_size is None or group_size < least:
        reason = ""
        if least > 1:
            reason = ": each completion is compared with the others of its prompt"
        raise ValueError(
            f"num_generations={group_size} is too small{reason}; training needs "
            f"num_generations >= {least}."
        )
    if round_rows % group_size:
        divisors = nearest_divisors(round_rows, group_size)
        legal = f"num_generations={divisors}, or " if divisors else ""
        raise ValueError(
            f"A generation round of {round_rows} sequences cannot hold whole groups of "
            f"num_generations={group_size}. Nearest legal: {legal}generation_batch_size="
            f"{nearest_multiples(round_rows, math.lcm(group_size, micro_rows))}."
        )


def check_eval_groups(rows: int, num_processes: int, group_size: int) -> None:
    """Check that an evaluation batch over all ranks holds whole groups."""
    if group_size < 1:
        raise ValueError(f"num_generations_eval={group_size} must be at least 1.")
    total = rows * num_processes
    if total % group_size:
        step = group_size // math.gcd(group_size, num_processes)
        raise ValueError(
            f"An evaluation batch of {total} sequences (per_device_eval_batch_size={rows} on "
            f"{pluralize(num_processes, 'rank')}) cannot hold whole groups of {group_size}. "
            f"Nearest legal: per_device_eval_batch_size={nearest_multiples(rows, step)}, or set "
            "num_generations_eval."
        )
