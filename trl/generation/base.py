"""What an engine that generates must offer, and what all engines share."""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..distributed import Ranks
from ..suggestions import did_you_mean
from ..types import Prompts

FinishReason = Literal["stop", "length"]
SEEDS = 2**62  # vLLM adds the place in a request to its seed, which is a signed 64-bit number
NAMED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
# Options of engines that change probabilities by what was generated before, or by a grammar.
NOT_REPLAYED = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("structured_outputs", "min_tokens", "thinking_token_budget", "watermarking", "extra_args"),
)
REFUSED = {"num_beams": "beam search picks completions instead of drawing them from the policy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are drawn. A row's tokens depend on its seed and prompt, not on its batch."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)  # engine options, merged last
    seeds: tuple[int, ...] | None = None  # B, one per row; None draws them from torch's generator

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def seeded(self, rows: int) -> Self:
        """Seed each row, unless all have seeds."""
        return self.replace(seeds=self.seeds or tuple(torch.randint(SEEDS, (rows,)).tolist()))

    def not_replayed(self) -> list[str]:
        """The options whose effect on probabilities no trainer computes after the engine."""
        extra = self.extra
        found = [f"{name}={extra[name]!r:.60}" for name in NOT_REPLAYED if extra.get(name)]
        if self.repetition_penalty != 1.0:
            found.append(f"repetition_penalty={self.repetition_penalty}")
        return found if extra.get("do_sample", True) else [*found, "do_sample=False"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generations:
    """What an engine returned. Each turn of the policy ends with, and includes, its stop token."""

    completion_ids: list[list[int]]  # B ragged
    finish: list[FinishReason]  # B
    sampling_logps: list[list[float]] | None = None  # B ragged: log-prob of each sampled token
    trainable: list[list[bool]] | None = None  # B ragged: False on tokens the policy did not write
    prompt_ids: list[list[int]] | None = None  # B ragged: prompts that replace the encoded ones
    messages: list[list[dict[str, Any]]] | None = None  # B: turns, where there may be several
    columns: list[dict[str, Any]] | None = None  # B: added to the rows for reward functions
    tool_calls: list[tuple[int, int]] | None = None  # B: calls made, and those that failed

    def __len__(self) -> int:
        return len(self.completion_ids)

    def prompts(self, encoded: Prompts) -> Prompts:
        """The prompts that were completed: as they were encoded, unless the engine chose others."""
        if self.prompt_ids is None:
            return encoded
        messages = [row["prompt"] for row in self.rows([{"prompt": m} for m in encoded.messages])]
        return dataclasses.replace(encoded, token_ids=self.prompt_ids, messages=messages)

    def rows(self, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The dataset rows with what the engine adds to them."""
        added = self.columns or [{}] * len(given)
        return [row | columns for row, columns in zip(given, added, strict=True)]

    def truncated(self) -> torch.Tensor:
        """Which completions (B,) were cut off."""
        return torch.tensor([reason != "stop" for reason in self.finish])

    def trained_lengths(self) -> list[int]:
        """Tokens of each completion that the policy wrote."""
        if self.trainable is None:
            return list(map(len, self.completion_ids))
        return list(map(sum, self.trainable))

    @classmethod
    def concatenate(cls, parts: Sequence["Generations"]) -> "Generations":
        """Join the rows of parts that one engine generated; what a part lacks is known of none."""
        joined: dict[str, Any] = {}
        for field_ in dataclasses.fields(cls):
            values = [getattr(part, field_.name) for part in parts]
            joined[field_.name] = (
                None if any(part is None for part in values) else [x for v in values for x in v]
            )
        return cls(**joined)


@dataclass(frozen=True, kw_only=True)
class PolicyHandle:
    """What engines that generate may know of the policy, whatever wraps it when it is read."""

    # The policy as it was prepared for training. Engines that shard weights replace it when
    # training begins, so nobody keeps what this returns.
    current: Callable[[], nn.Module]
    tokenizer: PreTrainedTokenizerBase
    ranks: Ranks  # all processes
    device: torch.device  # of the policy on this rank
    dtype: torch.dtype  # in which it computes
    # Log-probabilities, at the sampling temperature, of a completion after a prompt, both in token
    # ids; all ranks ask for them together.
    logps: Callable[[list[int], list[int]], list[float]]
    # Yields the bare policy in evaluation mode; all ranks enter and leave together.
    inference: Callable[[], AbstractContextManager[Any]]
    # Whether it is gathered layer by layer, so that all ranks must run layers equally often.
    layers_in_step: bool = False

    @property
    def model(self) -> nn.Module:
        """The policy as it is now."""
        return self.current()


class GenerationBackend(ABC):
    """Where completions come from. The trainer knows nothing else about engines."""

    reports_policy_logps = False  # whether `sampling_logps` are of the weights that train
    context: int | None = None  # most tokens of prompt and completion. None: as the policy sees

    def sync_weights(self, step: int) -> None:  # noqa: B027
        """Make the engine hold the weights of optimizer step `step`, unless it is the policy."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep an engine that sleeps outside generation awake for several generations in a row."""
        yield

    @abstractmethod
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete the B rows of this rank, in their order; those of a prompt are neighbors.

        Over all ranks a prompt has `group_size` completions.
        """


@dataclass(eq=False)
class AroundEngine(GenerationBackend):
    """A backend around another one, with that one's weights and log-probabilities."""

    engine: GenerationBackend

    def __post_init__(self) -> None:
        self.reports_policy_logps = self.engine.reports_policy_logps

    def sync_weights(self, step: int) -> None:
        """Sync the weights of the engine."""
        self.engine.sync_weights(step)


def merge_named(
    sampling: Sampling,
    legal: Collection[str],
    refused: Mapping[str, str],
    aliases: Mapping[str, str],
    kind: str,
) -> Sampling:
    """Let `Sampling.extra` win over the named options, and keep only the others in it.

    Of the engine's options, `legal`, some are `refused`, with a reason, besides those that no
    engine may use, and some have `aliases`. A ValueError names what is refused or unknown, and
    calls it `kind`, as in "a generation option".
    """
    refused = {**REFUSED, **refused}
    for name in sampling.extra:
        if name in refused:
            raise ValueError(
                f"generation_kwargs[{name!r}] cannot be used in training: {refused[name]}."
            )
        if name not in legal:
            hint = did_you_mean(name, legal)
            raise ValueError(f"generation_kwargs[{name!r}] is not {kind}.{hint}")
    rest = {aliases.get(name, name): value for name, value in sampling.extra.items()}
    named = {name: rest.pop(name) for name in NAMED if name in rest}
    return sampling.replace(extra=rest, **named)


def row_seeds(key: Sequence[object], first_row: int, count: int) -> tuple[int, ...]:
    """Derive one 63-bit seed for each row from what identifies the round, and its place in it.

    `first_row` is an index over all ranks, so that any number of them draws the same completions.
    """
    prefix = "/".join(map(str, key))
    digests = (
        hashlib.blake2b(f"{prefix}/{row}".encode(), digest_size=8).digest()
        for row in range(first_row, first_row + count)
    )
    return tuple(int.from_bytes(digest, "big") >> 1 for digest in digests)


def cut_at_stop(
    ids: Sequence[int], stop_ids: Sequence[int], max_tokens: int
) -> tuple[list[int], FinishReason]:
    """Cut a completion after its first stop token, or after `max_tokens`; says which it was."""
    kept, stops = list(ids[:max_tokens]), set(stop_ids)
    end = next((place for place, token in enumerate(kept, 1) if token in stops), None)
    return kept[:end], "length" if end is None else "stop"


def cut_generations(
    rows: Sequence[Sequence[int]], sampling: Sampling, logps: list[list[float]] | None = None
) -> Generations:
    """Cut each completion as `cut_at_stop` does; `logps` are those of the tokens that are left."""
    cut = [cut_at_stop(row, sampling.stop_ids, sampling.max_tokens) for row in rows]
    return Generations(
        completion_ids=[ids for ids, _ in cut],
        finish=[reason for _, reason in cut],
        sampling_logps=logps,
    )
