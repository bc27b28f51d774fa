"""What a training step computes on: groups of rows that share a prefix, and their tensors.

Letters in shapes: G groups, K rows of the largest group, B rows (the branches of all groups),
C tokens of the longest branch, N rows of all ranks; () is a scalar tensor. In prose about rollouts,
G is the number of completions of a prompt instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .distributed import Ranks
from .ops.masking import pad_ragged
from .types import Mode, Prefix, RewardTable, Rows


@dataclass(frozen=True, eq=False)
class Branch:
    """One continuation of a prefix: a completion, an answer, or the rest of a document."""

    ids: Sequence[int]
    loss_mask: Sequence[bool]  # which of its tokens are in the loss
    row: int | None = None  # of the rank's rollout batch, for messages; None: that of its group
    prefix: Prefix | None = None  # what an environment gave it to read; None: that of its group


@dataclass(frozen=True, eq=False)
class Group:
    """A prefix and the branches that continue it: the completions of a prompt, or its answers."""

    prefix: Prefix
    branches: tuple[Branch, ...]
    row: int  # of the dataset, or of the rank's rollout batch; for messages
    is_filler: bool = False  # keeps the number of batches equal on all ranks; not in the loss
    origin: str = ""  # the dataset of a mixture that the row is from, if it has a name

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes; those of the prefix count once."""
        return len(self.prefix) + sum(len(branch.ids) for branch in self.branches)


class Columns(TypedDict, total=False):
    """Tensors that a batch has from some stage on; the first dimension is always B.

    Which of them exist depends on the stage and on options, so reading one that was not computed is
    a KeyError that names it.
    """

    # Of a prepared dataset.
    label: Tensor  # (B,) bool: whether an answer is desirable
    margin: Tensor  # (B,) by which the better answer of the group should win
    rank: Tensor  # (B,) int: place of an answer in its group's order; the lowest is the best
    ref_answer_logps: Tensor  # (B,) `ref_logps` summed over an answer, if computed beforehand
    # Of a rollout.
    sampling_logps: Tensor  # (B, C) of the engine; the correction undoes what its filters change
    rewards: Tensor  # (B,) that credit is computed from; NaN: not scorable
    # Of `annotate`, without gradient.
    old_logps: Tensor  # (B, C) under the weights that begin training on the batch
    ref_logps: Tensor  # (B, C) under the reference policy
    log_mass: Tensor  # (B, C) log-probability of the tokens that the sampler's filters leave
    values: Tensor  # (B, C) before each token
    entropies: Tensor  # (B, C) of the next-token distributions, for credit
    # Of `credit`, or right before or after it.
    mismatched_ratios: Tensor  # (B,) log-ratio of another answer behind the prompt, for KTO's KL
    advantages: Tensor  # (B,) or (B, C)
    returns: Tensor  # (B, C) what the values should have been
    objective_mask: Tensor  # (B, C) bool: tokens that have an objective, of those in the loss
    has_gradient: Tensor  # (B,) bool, on the CPU; False: the row's gradient is exactly zero
    aot_logps: Tensor  # (B,) answers of the step with which `aot` compares an answer
    aot_unpaired_logps: Tensor  # (B,) the same for `aot_unpaired`
    kl: Tensor  # (B,) the KL estimate of the step, the same for all rows
    # Of `EngineCorrection`, for each chunk; `ratio` has a gradient.
    ratio: Tensor  # (B, C) or (B, 1) probability under the current policy over that under the old
    weights: Tensor  # (B, C) or (B, 1) that losses are multiplied by


@dataclass(frozen=True, eq=False)
class Totals:
    """What losses are divided by: numbers () of an optimizer step over all ranks."""

    tokens: Tensor  # in the loss
    rows: Tensor  # with a token in the loss
    all_rows: Tensor  # also those without, and fillers
    all_units: Tensor  # of `Batch.units`, fillers too
    groups: Tensor  # without fillers
    first_tokens: Tensor  # in the loss, of the first branch of each group
    pairs: Tensor  # of a better and a worse branch of one group
    # Tokens of one's own micro-batch, times the micro-batches of the step on all ranks.
    micro_batch_tokens: Tensor

    @classmethod
    def of(cls, batch: "Batch") -> "Totals":
        """Count one batch."""
        tokens = batch.loss_mask.sum()
        pairs = batch.is_better.sum() if "rank" in batch.columns else tokens.new_zeros(())
        return cls(
            tokens=tokens,
            rows=batch.loss_mask.any(1).sum(),
            all_rows=tokens.new_full((), len(batch)),
            all_units=tokens.new_full((), len(batch.units)),
            groups=batch.group_mask.sum(),
            first_tokens=batch.loss_mask[batch.branch_rows(0)].sum(),
            pairs=pairs,
            micro_batch_tokens=tokens,
        )

    def stack(self) -> Tensor:
        """All numbers as one tensor."""
        return torch.stack([getattr(self, item.name) for item in fields(self)])

    def scaled(self, factor: float) -> "Totals":
        """Multiply all numbers."""
        return Totals(*(self.stack() * factor).unbind())


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A micro-batch, a chunk of one, or a whole rollout batch: what every trainer trains on."""

    groups: tuple[Group, ...]
    loss_mask: Tensor  # (B, C) bool: tokens in the loss; False for fillers
    columns: Columns = field(default_factory=Columns)
    mode: Mode = "train"
    keeps_groups: bool = False  # a chunk never divides a group, whose branches are compared
    step_totals: Totals | None = None  # of the optimizer step, on all ranks; None: in no step yet

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        columns: Columns | None = None,
        mode: Mode = "train",
        keeps_groups: bool = False,
    ) -> "Batch":
        """Make a batch of groups, on the CPU. The first token of a row without prefix never counts.

        Nothing predicts it.
        """
        masks = []
        for group in groups:
            for branch in group.branches:
                mask = [False] * len(branch.ids) if group.is_filler else list(branch.loss_mask)
                if not len(group.prefix) and mask:
                    mask[0] = False
                masks.append(mask)
        return cls(
            groups=tuple(groups),
            loss_mask=pad_ragged(masks, False),
            columns=columns or Columns(),
            mode=mode,
            keeps_groups=keeps_groups,
        )

    def __len__(self) -> int:
        return len(self.loss_mask)

    @property
    def totals(self) -> Totals:
        """What the losses of the optimizer step are divided by, on all ranks."""
        if self.step_totals is None:
            raise ValueError("The batch is in no optimizer step: call `with_totals`.")
        return self.step_totals

    @cached_property
    def rows(self) -> Rows:
        """What a scorer reads: the branches of a prefix are next to each other."""
        pairs = [(group, branch) for group in self.groups for branch in group.branches]
        return Rows(
            prefixes=[
                group.prefix if branch.prefix is None else branch.prefix for group, branch in pairs
            ],
            completion_ids=[branch.ids for _, branch in pairs],
            row_ids=[group.row if branch.row is None else branch.row for group, branch in pairs],
        )

    @cached_property
    def group_sizes(self) -> list[int]:
        """Branches of each group."""
        return [len(group.branches) for group in self.groups]

    @cached_property
    def group_rows(self) -> list[range]:
        """Rows of each group."""
        ends = accumulate(self.group_sizes)
        return [range(end - size, end) for end, size in zip(ends, self.group_sizes, strict=True)]

    @property
    def group_mask(self) -> Tensor:
        """Which groups are no fillers: (G,) bool."""
        is_real = torch.tensor([not group.is_filler for group in self.groups])
        return is_real.to(self.loss_mask.device, non_blocking=True)

    @property
    def exists(self) -> Tensor:
        """Which branches there are, and not only as fillers: (G, K) bool."""
        return self.by_group(self.row_mask)

    @property
    def row_mask(self) -> Tensor:
        """Which rows are of groups that are no fillers: (B,) bool."""
        is_real = [not group.is_filler for group in self.groups for _ in group.branches]
        return self._on_device(torch.tensor(is_real, dtype=torch.bool))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each branch that something predicts: (B,) int64."""
        counts = [
            len(branch.ids) - (not len(group.prefix))
            for group in self.groups
            for branch in group.branches
        ]
        return self._on_device(torch.tensor(counts))

    @property
    def is_better(self) -> Tensor:
        """Which branch of a group is better, of lower rank, than which: (G, K, K) bool."""
        rank = self.by_group(self.columns["rank"])
        exists = self.exists
        is_lower = rank[:, :, None] < rank[:, None, :]
        return is_lower & exists[:, :, None] & exists[:, None, :]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes for groups that are no fillers; prefixes count once."""
        return sum(group.num_tokens for group in self.groups if not group.is_filler)

    def by_group(self, values: Tensor) -> Tensor:
        """Bring values of rows (B, ...) to their groups: (G, K, ...), 0 beyond the last branch."""
        return pad_sequence(list(values.split(self.group_sizes)), batch_first=True)

    def by_row(self, values: Tensor) -> Tensor:
        """Bring values of groups (G, ...) to all of their rows: (B, ...)."""
        groups = [index for index, size in enumerate(self.group_sizes) for _ in range(size)]
        return values[self._on_device(torch.tensor(groups, dtype=torch.long))]

    def branch_rows(self, number: int) -> Tensor:
        """The row of branch `number` of each group, which all of them must have: (G,) int64."""
        rows = [group_rows.start + number for group_rows in self.group_rows]
        return self._on_device(torch.tensor(rows, dtype=torch.long))

    def branch_mask(self, number: int) -> Tensor:
        """Which rows are branch `number` of a group that is no filler: (B,) bool."""
        is_chosen = [
            index == number and not group.is_filler
            for group in self.groups
            for index in range(len(group.branches))
        ]
        return self._on_device(torch.tensor(is_chosen, dtype=torch.bool))

    def with_columns(self, **columns: Unpack[Columns]) -> "Batch":
        """Add columns, or replace them."""
        return replace(self, columns=Columns(**{**self.columns, **columns}))

    def without_columns(self, *names: str) -> "Batch":
        """Leave out columns."""
        columns: Any = {name: value for name, value in self._items() if name not in names}
        return replace(self, columns=columns)

    def weighted(self, losses: Tensor) -> Tensor:
        """Multiply losses (B, C) or (B, 1) by the weights of the correction, if there are any."""
        return losses * self.columns["weights"] if "weights" in self.columns else losses

    def to(self, device: torch.device) -> "Batch":
        """Move the tensors, but for `has_gradient`."""
        columns: Any = {
            name: value if name == "has_gradient" else value.to(device, non_blocking=True)
            for name, value in self._items()
        }
        mask = self.loss_mask.to(device, non_blocking=True)
        return replace(self, loss_mask=mask, columns=columns)

    # --- Cutting ---

    def select(self, rows: Sequence[int]) -> "Batch":
        """Return some rows, which must be ascending; a group keeps the branches that are chosen.

        (B, C) columns are cut to the longest branch left. Totals stay those of the step.
        """
        if any(row >= following for row, following in pairwise(rows)):
            raise ValueError(f"The rows to select must be ascending: {list(rows)}.")
        chosen = set(rows)
        groups: list[Group] = []
        for group, group_rows in zip(self.groups, self.group_rows, strict=True):
            pairs = zip(group_rows, group.branches, strict=True)
            branches = tuple(branch for row, branch in pairs if row in chosen)
            if branches:
                groups.append(replace(group, branches=branches))
        width = max((len(branch.ids) for group in groups for branch in group.branches), default=0)
        index = torch.tensor(list(rows), dtype=torch.long)
        columns: Any = {}  # mypy does not follow a loop over the keys of a TypedDict
        for name, column in self._items():
            part = column[index.to(column.device, non_blocking=True)]
            columns[name] = part if part.dim() == 1 else part[:, : max(width, 1)]
        mask = self.loss_mask[self._on_device(index)][:, :width]
        return replace(self, groups=tuple(groups), loss_mask=mask, columns=columns)

    def select_branch(self, number: int) -> "Batch":
        """Return one branch of every group."""
        return self.select([group_rows.start + number for group_rows in self.group_rows])

    @cached_property
    def units(self) -> list[range]:
        """Rows of each unit, which is never divided: a group if `keeps_groups`, else a row."""
        if self.keeps_groups:
            return self.group_rows
        return [range(row, row + 1) for row in range(len(self))]

    def select_units(self, units: range) -> "Batch":
        """Return consecutive units."""
        if len(units) == len(self.units):
            return self
        first, last = self.units[units.start], self.units[units.stop - 1]
        return self.select(range(first.start, last.stop))

    def tokens_per_unit(self) -> list[int]:
        """Tokens of each unit; those of a prefix count at its first row."""
        tokens = self.rows.computed_tokens()
        return [sum(tokens[row] for row in unit) for unit in self.units]

    def split(self, count: int) -> list["Batch"]:
        """Cut into `count` batches of equally many rows; a ValueError if that is impossible."""
        size, rest = divmod(len(self), count)
        if rest:
            raise ValueError(f"{len(self)} rows cannot be cut into {count} batches of equal size.")
        return [self.select(range(start, start + size)) for start in range(0, len(self), size)]

    def _items(self) -> Iterator[tuple[str, Tensor]]:
        yield from cast(dict[str, Tensor], self.columns).items()

    def _on_device(self, values: Tensor) -> Tensor:
        return values.to(self.loss_mask.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """The micro-batches of an optimizer step on this rank; or a rollout batch, as one batch.

    `table` has the rewards of a rollout batch, of all ranks.
    """

    batches: list[Batch]
    ranks: Ranks
    table: RewardTable | None = None

    @property
    def batch(self) -> Batch:
        """The only batch; a ValueError if there are several."""
        (batch,) = self.batches
        return batch

    @property
    def mode(self) -> Mode:
        """What the batches are for."""
        return self.batches[0].mode

    def with_batches(self, batches: Sequence[Batch]) -> "Step":
        """Replace the batches."""
        return replace(self, batches=list(batches))

    @property
    def rewards(self) -> RewardTable:
        """The table; a ValueError if nothing was rewarded."""
        if self.table is None:
            raise ValueError("The step has no rewards: they exist for rollout batches alone.")
        return self.table

    def with_rewards(self, rewards: Tensor) -> "Step":
        """Give the rows of a rollout batch their entries of the rewards (N,) of all ranks."""
        return self.with_batches([self.batch.with_columns(rewards=self._local(rewards))])

    def with_advantages(self, advantages: Tensor) -> "Step":
        """Give the rows of a rollout batch their entries of the advantages (N,) of all ranks."""
        return self.with_batches([self.batch.with_columns(advantages=self._local(advantages))])

    def _local(self, values: Tensor) -> Tensor:
        """Return this rank's values (B,) of those (N,) of all ranks, on the device of the batch."""
        return self.ranks.local(values).to(self.batch.loss_mask.device)


def with_totals(batches: Sequence[Batch], ranks: Ranks) -> list[Batch]:
    """Let the micro-batches of a step know its totals, on all ranks.

    Ranks that divide the tokens of a row each count it.
    """
    counts = [Totals.of(batch) for batch in batches]
    device = counts[0].tokens.device
    sums = ranks.sum(torch.stack([count.stack() for count in counts]).sum(0))
    step = Totals(*sums.to(device).unbind())
    times = len(batches) * ranks.count
    return [
        replace(batch, step_totals=replace(step, micro_batch_tokens=count.tokens * times))
        for batch, count in zip(batches, counts, strict=True)
    ]
