"""What flows between the stages of a training step.

Letters in shapes: B rows on this rank, N rows on all ranks, G rows of one prompt, C completion
tokens (width of the longest completion), F reward functions. A ragged field is a list of lists.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
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
    seeds: tuple[int, ...] | None = None  # B: that completions are drawn with. None: any

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def prefixes(self) -> list[Prefix]:
        """The prompts as prefixes (B); equal prompts are equal prefixes."""
        return prefixes_of(self.token_ids)

    def select(self, index: Sequence[int]) -> "Prompts":
        """Return the given rows, without tools and seeds."""
        return Prompts(
            messages=[self.messages[i] for i in index],
            token_ids=[self.token_ids[i] for i in index],
            rows=None if self.rows is None else [self.rows[i] for i in index],
        )


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

    def computed_tokens(self) -> list[int]:
        """Tokens of each row, by which rows are cut; those of a shared prefix count once."""
        tokens = []
        previous: Prefix | None = None
        for prefix, completion in zip(self.prefixes, self.completion_ids, strict=True):
            shared = len(prefix) if prefix == previous else 0
            tokens.append(len(prefix) + len(completion) - shared)
            previous = prefix
        return tokens

    def select(self, index: Sequence[int]) -> "Rows":
        """Return the given rows."""
        return Rows(
            prefixes=[self.prefixes[i] for i in index],
            completion_ids=[self.completion_ids[i] for i in index],
            row_ids=[self.row_ids[i] for i in index],
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
