"""What flows between the stages of a training step.

Letters in shapes: B rows on this rank, N rows on all ranks, G rows of one prompt, C completion
tokens (width of the longest completion), F reward functions. A ragged field is a list of lists.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

Mode = Literal["train", "eval"]
# What users of Hugging Face TRL import to say what they pass to a trainer.
RewardFunc = str | nn.Module | Callable[..., list[float | None]]
RolloutFunc = Callable[..., Mapping[str, Any]]
EnvironmentFactory = Callable[[], Any] | dict[str, Callable[[], Any]]


@dataclass(frozen=True, eq=False)
class Media:
    """An image, or another input that is no text, of a prompt."""

    digest: bytes  # of its content
    inputs: Mapping[str, Tensor]  # what its encoder reads


@dataclass(frozen=True, eq=False)
class Prefix:
    """What the rows of a group begin with: token ids, and media where there are any.

    Two prefixes are equal if their keys are. Nothing else decides whether rows share a prefix: two
    images may have the same placeholder tokens.
    """

    ids: Sequence[int]
    media: tuple[Media, ...] = ()

    @cached_property
    def key(self) -> bytes:
        """A digest of the ids and of the content of the media."""
        digest = hashlib.blake2b(array("q", self.ids).tobytes(), digest_size=16)
        for media in self.media:
            digest.update(media.digest)
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix) or len(self.ids) != len(other.ids):
            return False
        return self is other or self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __len__(self) -> int:
        return len(self.ids)


def prefixes_of(token_ids: Sequence[Sequence[int]]) -> list[Prefix]:
    """Make prefixes of prompts without media; equal prompts that are neighbors are one object."""
    prefixes: list[Prefix] = []
    for ids in token_ids:
        prefix = Prefix(ids)
        if prefixes and prefixes[-1] == prefix:
            prefix = prefixes[-1]
        prefixes.append(prefix)
    return prefixes


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Encoded prompts, one entry per row; rows of one prompt are consecutive."""

    messages: list[Any]  # B: strings, or lists of chat messages
    token_ids: list[list[int]]  # B ragged
    rows: list[dict[str, Any]] | None = None  # B: of the dataset
    tools: Sequence[Mapping[str, Callable[..., Any]]] | None = None  # B: that only the row may call

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def prefixes(self) -> list[Prefix]:
        """The prompts as prefixes (B); equal prompts are equal prefixes."""
        return prefixes_of(self.token_ids)

    def select(self, index: Sequence[int]) -> "Prompts":
        """Return the given rows, without tools."""
        columns = {name: getattr(self, name) for name in ("messages", "token_ids", "rows")}
        return Prompts(**{name: x and [x[i] for i in index] for name, x in columns.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a model is to score: rows of token ids, those that share a prompt next to each other.

    A row with an empty prompt is a document, whose first token nothing predicts.
    """

    prefixes: Sequence[Prefix]  # B: what comes before the scored tokens
    completion_ids: Sequence[Sequence[int]]  # B ragged: the scored tokens
    row_ids: Sequence[int]  # B: index of the row in this rank's round or dataset, for messages

    @staticmethod
    def of(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Rows":
        """Number rows of (prompt, completion)."""
        return Rows(
            prefixes=prefixes_of([prompt for prompt, _ in rows]),
            completion_ids=[completion for _, completion in rows],
            row_ids=range(len(rows)),
        )

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def prompt_ids(self) -> list[Sequence[int]]:
        """Token ids of the prefixes: B ragged."""
        return [prefix.ids for prefix in self.prefixes]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        pairs = zip(self.prefixes, self.completion_ids, strict=True)
        return [len(prefix) + len(completion) for prefix, completion in pairs]

    def unit_tokens(self) -> list[int]:
        """Tokens of each row, by which rows are cut; those of a shared prefix count once."""
        tokens = []
        previous: Prefix | None = None
        for prefix, completion in zip(self.prefixes, self.completion_ids, strict=True):
            shared = len(prefix) if prefix == previous else 0
            tokens.append(len(prefix) + len(completion) - shared)
            previous = prefix
        return tokens

    def tokens_per_unit(self) -> list[int]:
        """Tokens of each row, see `unit_tokens`."""
        return self.unit_tokens()

    def select_units(self, units: range) -> Self:
        """Return consecutive rows."""
        return self if len(units) == len(self) else self.select(units)

    def select(self, index: Sequence[int]) -> Self:
        """Return the given rows, with (B, C) fields cut to the longest completion left."""
        width = max((len(self.completion_ids[i]) for i in index), default=0)
        changes: dict[str, Any] = {}
        rows = torch.tensor(list(index), dtype=torch.long)
        for field_ in dataclasses.fields(self):
            name, value = field_.name, getattr(self, field_.name)
            if isinstance(value, (list, tuple, range)):
                changes[name] = [value[i] for i in index]
            elif isinstance(value, Tensor) and value.dim():  # totals have no rows
                rows = rows.to(value.device, non_blocking=True)
                changes[name] = value[rows] if value.dim() == 1 else value[rows, :width]
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout(Rows):
    """Completions with everything the loss needs. Rows of one prompt stay next to each other.

    `loss_mask` says which tokens are trained on; which tokens exist follows from the lengths of
    `completion_ids`. The two totals are over all ranks and fixed when the rollout is made, so the
    gradient does not depend on how the rows are cut into micro-batches.
    """

    loss_mask: Tensor  # (B, C) bool
    num_loss_tokens: Tensor  # () trained-on tokens of the round, all ranks
    num_loss_rows: Tensor  # () rows with at least one trained-on token, all ranks
    mode: Mode = "train"  # what it was generated for
    num_micro_batches: int = 1  # micro-batches the round is cut into on this rank
    old_logps: Tensor | None = None  # (B, C) under the policy that generated
    ref_logps: Tensor | None = None  # (B, C) under the reference policy
    sampling_logps: Tensor | None = None  # (B, C) as reported by the engine
    sampled_by_policy: bool = False  # whether these are the policy's own, of the weights that train
    log_mass: Tensor | None = None  # (B, C) of the sampler's filters, with `old_logps`
    values: Tensor | None = None  # (B, C) before each token, of the weights that generated
    entropies: Tensor | None = None  # (B, C) of the policy that generated, for credit
    objective_mask: Tensor | None = None  # (B, C) bool: tokens with an objective. None: loss_mask
    rewards: Tensor | None = None  # (B,) that credit is computed from; NaN: unscorable
    advantages: Tensor | None = None  # (B,) or (B, C)
    returns: Tensor | None = None  # (B, C) what values should have been
    weights: Tensor | None = None  # (B, C) or (B, 1) that the losses are multiplied by
    num_micro_batch_tokens: Tensor | None = None  # () trained-on tokens of the micro-batch
    num_micro_batch_rows: int | None = None  # rows of the micro-batch
    has_gradient: list[bool] | None = None  # B; False: the row's gradient is exactly zero

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    @property
    def has_foreign_logps(self) -> bool:
        """Whether an engine that computes in another way than the policy reported its own."""
        return self.sampling_logps is not None and not self.sampled_by_policy

    def resolved(self, scores: "TokenScores") -> Self:
        """Take the detached `scores` for those under the policy that generated, if none are known.

        On-policy, the weights have not moved since: the ratio is then exactly 1, and its gradient
        that of the log-probability. No rounding of the forward pass can make it differ.
        """
        if self.old_logps is not None:
            return self
        return self.replace(old_logps=scores.logps.detach(), log_mass=scores.log_mass)

    def weighted(self, losses: Tensor) -> Tensor:
        """Multiply losses (B, C) or (B, 1) by the weights of their tokens or completions."""
        return losses if self.weights is None else losses * self.weights

    @property
    def micro_batch_tokens(self) -> Tensor:
        """Trained-on tokens () of the micro-batch, also when only a part of its rows is at hand."""
        known = self.num_micro_batch_tokens
        return self.loss_mask.sum() if known is None else known

    @property
    def share_of_micro_batch(self) -> float:
        """Rows at hand, as a share of those of the micro-batch."""
        return len(self) / (self.num_micro_batch_rows or len(self))

    def chunks(self, count: int) -> Iterator[Self]:
        """Cut into `count` equally long runs of rows; a ValueError if that is impossible."""
        size, rest = divmod(len(self), count)
        if rest:
            raise ValueError(f"{len(self)} rows cannot be cut into {count} chunks of equal size.")
        for start in range(0, len(self), size):
            part = self.select(range(start, start + size))
            yield part.replace(
                num_micro_batch_tokens=part.loss_mask.sum(), num_micro_batch_rows=size
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTable:
    """Rewards of one round, gathered over all ranks; NaN means not applicable or unscorable."""

    per_function: Tensor  # (N, F)
    weights: Tensor  # (F,)
    total: Tensor  # (N,) weighted sum over the functions that scored the row; NaN if none did
    names: tuple[str, ...]  # F
    group_size: int
    ended: Tensor | None = None  # (N,) bool: which completions were not cut off

    def without(self, excluded: Tensor) -> Self:
        """Return the table in which the rows marked in `excluded` (N,) count as unscorable."""
        return dataclasses.replace(
            self,
            per_function=self.per_function.masked_fill(excluded[:, None], torch.nan),
            total=self.total.masked_fill(excluded, torch.nan),
        )

    @property
    def has_ended(self) -> Tensor:
        """Which completions were not cut off: (N,) bool."""
        return torch.ones_like(self.total, dtype=torch.bool) if self.ended is None else self.ended

    def with_truncation_penalty(self, penalty: float | None) -> Tensor:
        """Return the totals (N,), minus a penalty for completions that were cut off."""
        return self.total - penalty * ~self.has_ended if penalty else self.total


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the scorer computed about the completion tokens of a rollout."""

    logps: Tensor  # (B, C); 0 beyond a completion's end
    entropies: Tensor | None = None  # (B, C) nats; 0 beyond a completion's end
    hits: Tensor | None = None  # (B, C) bool: no token is likelier; False beyond the end
    # Statistics of next-token logits (B, C), of which at most one is computed; 0 beyond the end.
    log_mass: Tensor | None = None  # log-probability of the tokens a sampler's filters leave
    log_collision: Tensor | None = None  # log-probability that two draws give the same token
    mean_logit: Tensor | None = None  # over the vocabulary
    values: Tensor | None = None  # (B, C) before each token; 0 beyond a completion's end
    aux_loss: Tensor | None = None  # () load-balancing loss of mixture-of-experts models

    def spread(self, rows: Sequence[int], logps: Tensor) -> "TokenScores":
        """Put the scores of some rows among those of a larger batch, at its places `rows`.

        `logps` (B, C) has log-probabilities of the rows that were not scored.
        """
        places, found = torch.as_tensor(list(rows), device=logps.device), {}
        for field_ in dataclasses.fields(self):
            values = getattr(self, field_.name)
            if values is not None and values.dim():
                base = logps if field_.name == "logps" else torch.zeros_like(logps)
                wide = torch.nn.functional.pad(values, (0, logps.shape[1] - values.shape[1]))
                values = base.to(values.dtype).index_copy(0, places, wide)
            found[field_.name] = values
        return TokenScores(**found)
