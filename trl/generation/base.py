"""What an engine that generates must offer, and what all engines share."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..distributed import Ranks
from ..text import did_you_mean
from ..types import FinishReason, Generations, Prompts, Sampling

NAMED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
REFUSED = {"num_beams": "beam search picks completions instead of drawing them from the policy"}


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
    """What is put around another backend: weights and log-probabilities are those of it."""

    engine: GenerationBackend

    def __post_init__(self) -> None:
        self.reports_policy_logps = self.engine.reports_policy_logps

    def sync_weights(self, step: int) -> None:
        """Sync those of the engine."""
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
    """Cut a completion behind its first stop token, or behind `max_tokens`; says which it was."""
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
