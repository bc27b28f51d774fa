"""What of a run decides how much memory it takes, and what the answer is made of."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .sharding import Sharding

# Tokens: shorter forwards over shared prompts are not cut, nor shorter passes over tails.
SHORTEST_PASS = 2048
SHORTEST_TAIL_PASS = 1536


@dataclass(frozen=True)
class RunSettings:
    """The options of a run that cost memory, as numbers.

    Letters: G completions of a prompt of P tokens, with C tokens each.

    Args:
        group_size (`int`): G.
        prompt (`int`): P, of the longest prompt.
        completion (`int`): C, of the longest completion.
        micro_batch (`int`): rows of one forward with gradient on a rank.
        slices (`int`): micro-batches of a round on a rank.
        accumulation (`int`): micro-batches of an optimizer step.
        passes (`int`): times a round is trained on.
        processes (`int`): ranks.
        weight_bytes (`int`): of a weight, and of an entry of the residual stream.
        product_bytes (`int`): of an entry that matrix products read and write; 2 under autocast.
        matrix_bytes (`float`, *optional*): of a quantized weight of the layers.
        optimizer (`str`): value of `optim`.
        optimizer_args (`str`, *optional*): value of `optim_args`.
        gradient_checkpointing (`bool`): activations are computed again in the backward pass.
        reference (`bool`): a reference policy is scored.
        scores_policy (`bool`): the policy is scored without gradient.
        shared_prefix (`bool`): one copy of a prompt in a forward.
        logits_chunk (`int`, *optional*): logits held at once. None: the default; 0: all.
        generation_rows (`int`, *optional*): most rows generated at once.
        generation_kv_gb (`float`, *optional*): most gigabytes of key-value cache at once.
        on_cpu (`bool`): whether a CPU trains; defaults differ.
        sharding (`Sharding`): what each of the ranks holds.
        loaded_bytes (`int`, *optional*): of a weight as it was loaded, where the engine casts it:
            DeepSpeed and FSDP in half precision.
        divides_quantized (`bool`): the engine can divide quantized weights.
        gathers (`bool`): all weights are gathered for generation from shards.
        engine_bytes (`float`, *optional*): of a generation engine on the same device, weights and
            cache; 0 if it runs elsewhere. None: the policy itself generates.
        engine_sleeps (`bool`): the engine gives them back outside generation.
    """

    group_size: int
    prompt: int
    completion: int
    micro_batch: int
    slices: int = 1
    accumulation: int = 1
    passes: int = 1
    processes: int = 1
    weight_bytes: int = 4
    product_bytes: int = 4
    matrix_bytes: float | None = None
    optimizer: str = "adamw_torch_fused"
    optimizer_args: str | None = None
    gradient_checkpointing: bool = True
    reference: bool = False
    scores_policy: bool = False
    shared_prefix: bool = True
    logits_chunk: int | None = None
    generation_rows: int | None = None
    generation_kv_gb: float | None = None
    on_cpu: bool = False
    sharding: Sharding = Sharding()
    loaded_bytes: int | None = None
    divides_quantized: bool = True
    gathers: bool = True
    engine_bytes: float | None = None
    engine_sleeps: bool = False

    def replace(self, **changes: Any) -> RunSettings:
        """Return a copy with fields changed."""
        return replace(self, **changes)

    @property
    def rows(self) -> int:
        """Rows of a round on one rank."""
        return self.micro_batch * self.slices

    @property
    def is_on_policy(self) -> bool:
        """Whether the weights never move between generating a round and training on it."""
        return self.accumulation % (self.slices * self.passes) == 0

    @property
    def autocast(self) -> bool:
        """Whether operands of matrix products are cast."""
        return self.weight_bytes != self.product_bytes

    def groups(self, rows: int) -> int:
        """Most prompts among so many rows in a row, where a group may begin at any micro-batch."""
        whole, rest = divmod(rows, self.group_size)
        if rest == 0 or (whole == 0 and self.group_size % rows == 0):
            return max(1, whole)
        return whole + 2

    def forward(self, rows: int, cuts: bool) -> Forward:
        """What one forward over so many rows computes.

        Args:
            rows (`int`): completions.
            cuts (`bool`): whether long forwards over shared prompts are made in passes.
        """
        if not self.shared_prefix:
            return Forward(((rows * (self.prompt + self.completion), 0),))
        prefix = min(rows, self.groups(rows)) * self.prompt
        tail = self.completion - 1  # the last token of a completion predicts nothing
        tails = rows * tail
        # With sharded weights a forward is always one pass, so that all ranks run as many.
        cuts = cuts and not self.sharding.divides_weights
        if not cuts or prefix + tails <= SHORTEST_PASS or not tails:
            return Forward(((prefix + tails, tails),))
        most = max(1, max(SHORTEST_TAIL_PASS, prefix // 2) // tail) * tail
        sizes = [most] * (tails // most) + [tails % most] * (tails % most > 0)
        return Forward(((prefix, 0), *((size, size) for size in sizes)))


@dataclass(frozen=True)
class Forward:
    """Tokens of one forward.

    Args:
        passes (`tuple`): one pair for each pass, in order: tokens that are computed together, and
            those among them that attend to a shared prompt.
    """

    passes: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all passes."""
        return sum(tokens for tokens, _ in self.passes)

    @property
    def is_cut(self) -> bool:
        """Whether there are several passes."""
        return len(self.passes) > 1

    @property
    def kept(self) -> int:
        """Tokens whose keys and values are kept for later passes: those of the first."""
        return self.passes[0][0] if self.is_cut else 0


@dataclass(frozen=True)
class Parts:
    """Bytes held at one moment, by what they are for."""

    weights: float = 0.0
    reference: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0
    optimizer: float = 0.0
    vllm: float = 0.0
    kv_cache: float = 0.0
    head: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, **more: float) -> Parts:
        """Return a copy with bytes added to some parts."""
        return replace(self, **{name: getattr(self, name) + size for name, size in more.items()})


def largest(moments: list[Parts]) -> Parts:
    """The moment at which most is held."""
    return max(moments, key=lambda parts: parts.total)
