"""What of a run decides how much memory it takes: the rows it computes, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..models.packed_passes import SHORTEST_PASS, tails_of_passes
from .sharding import Sharding

if TYPE_CHECKING:
    from ..trainer.online.online_config import OnlineConfig

ASSUMED_PROMPT = 512  # tokens, where nothing says how long prompts are


@dataclass(frozen=True)
class RunSettings:
    """The options of a run that cost memory, as numbers.

    A row is a shared beginning of P tokens (a prompt) and own tokens, C of them (a completion); G
    rows in a row share their beginning. Pairs of chosen and rejected answers have G = 2, documents
    G = 1 and P = 0.
    """

    group_size: int  # G
    prompt: int  # P, of the longest prompt
    completion: int  # C, of the longest completion
    micro_batch: int  # rows of one forward with gradient on a rank
    slices: int = 1  # micro-batches of a round on a rank
    accumulation: int = 1  # micro-batches of an optimizer step
    passes: int = 1  # times a round is trained on
    processes: int = 1  # ranks
    generates: bool = True  # False: the rows come from a dataset
    trained_models: int = 1  # of this size; 2 with a value model
    weight_bytes: int = 4  # of a weight, and of an entry of the residual stream
    product_bytes: int = 4  # of what matrix products read and write; 2 under autocast
    matrix_bytes: float | None = None  # of a quantized weight of the layers
    optimizer: str = "adamw_torch_fused"  # value of `optim`
    optimizer_args: str | None = None
    gradient_checkpointing: bool = True
    reference: bool = False  # a reference policy is scored
    scores_policy: bool = False  # the policy is scored without gradient
    shared_prefix: bool = True  # one copy of a prompt in a forward
    logits_chunk: int | None = None  # logits held at once; None: the default; 0: all
    generation_rows: int | None = None  # most rows generated at once
    generation_kv_gb: float | None = None  # most gigabytes of key-value cache at once
    on_cpu: bool = False  # a CPU trains; defaults differ
    sharding: Sharding = Sharding()  # what each of the ranks holds
    # Of a weight as it was loaded, where the engine casts it: DeepSpeed and FSDP in half precision.
    loaded_bytes: int | None = None
    divides_quantized: bool = True  # the engine can divide quantized weights
    gathers: bool = True  # all weights are gathered for generation from shards
    # Weights and cache of a generation engine on the same device; 0 if it runs elsewhere. None: the
    # policy itself generates.
    engine_bytes: float | None = None
    engine_sleeps: bool = False  # it gives them back outside generation

    @classmethod
    def of(cls, args: OnlineConfig, **facts: Any) -> RunSettings:
        """What the options of a run say of its memory.

        Args:
            args (`OnlineConfig`): the options.
            facts: further fields, of the model and the device; they win.
        """
        batches = args.batch_plan
        options = {
            "group_size": batches.group_size,
            "completion": args.max_completion_length or 1,
            "micro_batch": batches.micro_batch,
            "slices": batches.slices,
            "accumulation": batches.accumulation,
            "passes": batches.iterations,
            "processes": batches.num_processes,
            "optimizer": str(getattr(args.optim, "value", args.optim)),
            "optimizer_args": args.optim_args,
            "gradient_checkpointing": bool(args.gradient_checkpointing),
            "reference": args.beta != 0.0,
            "scores_policy": args.scores_policy,
            "shared_prefix": args.shared_prefix,
            "logits_chunk": args.logits_chunk_size,
            "generation_rows": args.generation_max_rows,
            "generation_kv_gb": args.generation_max_kv_gb,
            "gathers": args.ds3_gather_for_generation,
        }
        return cls(**(options | facts))

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

    def forward_passes(self, cuts: bool) -> list[int]:
        """Tokens of each pass of the forward over a micro-batch.

        Args:
            cuts (`bool`): whether a long forward over shared prompts is made in passes: one over
                the prompts, then some over the completions.
        """
        rows = self.micro_batch
        if not self.shared_prefix:
            return [rows * (self.prompt + self.completion)]
        prefix = min(rows, self.groups(rows)) * self.prompt
        tail = self.completion - 1  # the last token of a completion predicts nothing
        # With sharded weights a forward is always one pass, so that all ranks run as many.
        whole = not cuts or self.sharding.divides_weights
        if whole or prefix + rows * tail <= SHORTEST_PASS or not tail:
            return [prefix + rows * tail]
        return [prefix, *(count * tail for count in tails_of_passes([tail] * rows, prefix))]
