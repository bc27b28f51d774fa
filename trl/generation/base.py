"""The interface of generation engines, and the data that goes in and out of them."""

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
# Seeds are below this: vLLM adds the index of a completion in its request to the seed, and holds
# the sum in a signed 64-bit integer.
SEED_LIMIT = 2**62
# The options that are fields of `Sampling`.
NAMED_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_tokens",
)
# Engine options that change a token's probability depending on earlier tokens or a grammar. The
# trainer cannot reproduce these probabilities in its own forward pass.
UNREPRODUCIBLE_OPTIONS = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "min_tokens",
    "thinking_token_budget",
    "watermarking",
    "extra_args",
)
# Options that no engine may use, and why.
REFUSED_OPTIONS = {
    "num_beams": "beam search picks completions instead of drawing them from the policy"
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are sampled.

    The tokens of a row depend on its seed and prompt alone, not on other rows of the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)  # options of one engine, applied last
    seeds: tuple[int, ...] | None = None  # B, one per row; None: drawn from torch's generator

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def with_seeds(self, rows: int) -> Self:
        """Return a copy with a seed for each row; seeds that are set stay."""
        if self.seeds:
            return self
        return self.replace(seeds=tuple(torch.randint(SEED_LIMIT, (rows,)).tolist()))

    def unreproducible_options(self) -> list[str]:
        """List the options whose effect on probabilities the trainer cannot reproduce."""
        options = [
            f"{name}={self.extra[name]!r:.60}"
            for name in UNREPRODUCIBLE_OPTIONS
            if self.extra.get(name)
        ]
        if self.repetition_penalty != 1.0:
            options.append(f"repetition_penalty={self.repetition_penalty}")
        if not self.extra.get("do_sample", True):
            options.append("do_sample=False")
        return options


@dataclass(frozen=True, kw_only=True, slots=True)
class Generations:
    """What an engine returned for B rows. Each turn of the policy includes its stop token."""

    completion_ids: list[list[int]]  # B ragged
    finish_reasons: list[FinishReason]  # B
    sampling_logps: list[list[float]] | None = None  # B ragged: log-prob of each sampled token
    policy_mask: list[list[bool]] | None = None  # B ragged: False: not written by the policy
    prompt_ids: list[list[int]] | None = None  # B ragged: prompts that replace the encoded ones
    messages: list[list[dict[str, Any]]] | None = None  # B: the turns, if there can be several
    extra_columns: list[dict[str, Any]] | None = None  # B: added to the rows for reward functions
    tool_call_counts: list[tuple[int, int]] | None = None  # B: calls made, calls that failed

    def __len__(self) -> int:
        return len(self.completion_ids)

    def completed_prompts(self, encoded: Prompts) -> Prompts:
        """Return the prompts that were completed: `encoded`, unless the engine replaced them."""
        if self.prompt_ids is None:
            return encoded
        rows = self.with_extra_columns([{"prompt": messages} for messages in encoded.messages])
        messages = [row["prompt"] for row in rows]
        return dataclasses.replace(encoded, token_ids=self.prompt_ids, messages=messages)

    def with_extra_columns(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the dataset rows with the columns that the engine adds."""
        extra_columns = self.extra_columns or [{}] * len(rows)
        return [row | columns for row, columns in zip(rows, extra_columns, strict=True)]

    def truncated(self) -> torch.Tensor:
        """Return which completions (B,) were truncated."""
        return torch.tensor([reason != "stop" for reason in self.finish_reasons])

    def policy_token_counts(self) -> list[int]:
        """Return the number of tokens of each completion that the policy wrote."""
        if self.policy_mask is None:
            return [len(ids) for ids in self.completion_ids]
        return [sum(row_mask) for row_mask in self.policy_mask]

    @classmethod
    def concatenate(cls, batches: Sequence["Generations"]) -> "Generations":
        """Join the rows of batches. A field that is None in one batch is None in the result."""
        fields: dict[str, Any] = {}
        for field_ in dataclasses.fields(cls):
            values = [getattr(batch, field_.name) for batch in batches]
            if any(value is None for value in values):
                fields[field_.name] = None
            else:
                fields[field_.name] = [row for value in values for row in value]
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class PolicyHandle:
    """What generation engines may use of the policy, whatever wraps the model."""

    # Returns the policy as prepared for training. Engines that shard weights replace the model when
    # training begins, so call this again instead of storing the result.
    current: Callable[[], nn.Module]
    tokenizer: PreTrainedTokenizerBase
    ranks: Ranks  # all processes
    device: torch.device  # of the policy on this rank
    dtype: torch.dtype  # in which the policy computes
    # (prompt ids, completion ids) -> log-probability of each completion token at the sampling
    # temperature. All ranks must call it together.
    logps: Callable[[list[int], list[int]], list[float]]
    # Context manager that yields the unwrapped policy in evaluation mode. All ranks must enter it
    # together.
    inference: Callable[[], AbstractContextManager[Any]]
    # True: weights are gathered layer by layer, so all ranks must run layers equally often.
    layers_in_lockstep: bool = False

    @property
    def model(self) -> nn.Module:
        """The current policy."""
        return self.current()


class GenerationBackend(ABC):
    """Completes prompts. This interface is all that the trainer knows of an engine."""

    reports_policy_logps = False  # whether `sampling_logps` come from the weights being trained
    context_length: int | None = None  # maximum tokens of prompt plus completion; None: the model's

    def sync_weights(self, step: int) -> None:  # noqa: B027
        """Copy the weights of optimizer step `step` to the engine, if it holds a copy."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep a sleeping engine awake during several calls of `generate`."""
        yield

    @abstractmethod
    def generate(self, prompts: Prompts, sampling: Sampling, group_size: int) -> Generations:
        """Complete the B rows of this rank, in their order; rows of one prompt are consecutive.

        Each prompt has `group_size` completions over all ranks.
        """

    def take_metrics(self) -> list[tuple[str, float]]:
        """Return names and values of what was measured since the last call."""
        return []


@dataclass(eq=False)
class BackendWrapper(GenerationBackend):
    """A backend that calls another one, whose weights and log-probabilities it has."""

    engine: GenerationBackend

    def __post_init__(self) -> None:
        self.reports_policy_logps = self.engine.reports_policy_logps

    def sync_weights(self, step: int) -> None:
        """Sync the weights of the wrapped engine."""
        self.engine.sync_weights(step)

    def take_metrics(self) -> list[tuple[str, float]]:
        """Return what the wrapped engine has measured."""
        return self.engine.take_metrics()


def merge_generation_kwargs(
    sampling: Sampling,
    legal: Collection[str],
    refused: Mapping[str, str],
    aliases: Mapping[str, str],
    description: str,
) -> Sampling:
    """Move named options from `Sampling.extra` to their fields, where they win; keep the others.

    `legal` are the engine's options, `refused` maps those that training cannot use to the reason,
    and `aliases` maps names of the engine to those of `Sampling`. A refused or unknown option is a
    ValueError, in which `description` names what it should be, such as "a generation option".
    """
    refused = {**REFUSED_OPTIONS, **refused}
    for name in sampling.extra:
        if name in refused:
            raise ValueError(
                f"generation_kwargs[{name!r}] cannot be used in training: {refused[name]}."
            )
        if name not in legal:
            hint = did_you_mean(name, legal)
            raise ValueError(f"generation_kwargs[{name!r}] is not {description}.{hint}")
    extra = {aliases.get(name, name): value for name, value in sampling.extra.items()}
    named = {name: extra.pop(name) for name in NAMED_OPTIONS if name in extra}
    return sampling.replace(extra=extra, **named)


def row_seeds(key: Sequence[object], first_row: int, count: int) -> tuple[int, ...]:
    """Derive a 63-bit seed for each of `count` rows from `key` and the row's index.

    `key` identifies the rollout batch. `first_row` is an index over all ranks, so the seeds do not
    depend on the number of ranks.
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
    """Truncate a completion after its first stop token, else after `max_tokens` tokens."""
    for end, token in enumerate(ids[:max_tokens], 1):
        if token in stop_ids:
            return list(ids[:end]), "stop"
    return list(ids[:max_tokens]), "length"


def generations_from_rows(
    rows: Sequence[Sequence[int]], sampling: Sampling, logps: list[list[float]] | None = None
) -> Generations:
    """Apply `cut_at_stop` to each completion. `logps` are of the remaining tokens."""
    cut_rows = [cut_at_stop(row, sampling.stop_ids, sampling.max_tokens) for row in rows]
    return Generations(
        completion_ids=[ids for ids, _ in cut_rows],
        finish_reasons=[reason for _, reason in cut_rows],
        sampling_logps=logps,
    )
