"""The settings of a run that decide its memory: rows, precision and sharding."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

from ..models.packed_layout import SHORTEST_PASS, tails_of_passes
from .model_size import ModelSize

if TYPE_CHECKING:
    from ..trainer.base.base_config import BaseConfig
    from ..trainer.offline.offline_config import OfflineConfig
    from ..trainer.online.online_config import OnlineConfig

ASSUMED_PROMPT = 512  # tokens, if the length of prompts is unknown
# Stages of sharding: what ranks divide; each includes those before it.
WHOLE, OPTIMIZER, GRADIENTS, WEIGHTS = range(4)

# fsdp_sharding_strategy by number or name, and fsdp_reshard_after_forward.
STRATEGIES = (*map(str.lower, FSDP_SHARDING_STRATEGY), "true", "false")


@dataclass(frozen=True)
class Sharding:
    """How ranks shard the model.

    Defaults are those of DeepSpeed, and of FSDP as configured by accelerate.
    """

    engine: str = "ddp"  # or "zero" (DeepSpeed), "fsdp1", "fsdp2"
    stage: int = WHOLE  # FSDP is at WEIGHTS
    ranks: int = 1  # that shard one copy of the model; with hybrid sharding, fewer than all
    keeps_weights: bool = False  # gathered weights stay until the backward pass ends
    offloads_optimizer: bool = False  # to the host
    offloads_weights: bool = False
    syncs: bool = False  # gradients are reduced after each micro-batch; otherwise FSDP sums them
    per_row: int = 1  # ranks that divide the tokens of each row (context parallelism)
    bucket: int = 500_000_000  # entries of DeepSpeed's buffer for reducing gradients
    live: int = 1_000_000_000  # entries of weights that ZeRO-3 keeps gathered
    sub_group: int = 1_000_000_000  # entries that ZeRO-3 updates at a time

    @property
    def is_zero(self) -> bool:
        return self.engine == "zero"

    @property
    def is_fsdp(self) -> bool:
        return self.engine.startswith("fsdp")

    @property
    def divides_weights(self) -> bool:
        """Whether a rank holds only a shard of each weight."""
        return self.stage >= WEIGHTS

    def fraction(self, stage: int) -> float:
        """Return the fraction that a rank holds of what this stage shards: 1 or 1 / ranks."""
        return 1 / self.ranks if self.stage >= stage else 1.0

    @property
    def name(self) -> str:
        """The usual name of the engine, with its stage."""
        if self.is_zero:
            return f"ZeRO-{self.stage}"
        if not self.is_fsdp:
            return "DDP"
        if not self.stage:
            return f"{self.engine.upper()}, nothing divided"
        if self.keeps_weights:
            return f"{self.engine.upper()}, weights kept until the backward pass"
        return self.engine.upper()


@dataclass(frozen=True)
class RunSettings:
    """The options of a run that affect memory, as numbers.

    A row has a prefix of P tokens (a prompt) and C tokens of its own (a completion); G consecutive
    rows share their prefix. Pairs of chosen and rejected answers have G = 2, documents G = 1 and
    P = 0.
    """

    group_size: int  # G
    prompt: int  # P, of the longest prompt
    completion: int  # C, of the longest completion
    micro_batch: int  # rows of one forward with gradient on a rank
    slices: int = 1  # micro-batches of a rollout batch on a rank
    accumulation: int = 1  # micro-batches of an optimizer step
    passes: int = 1  # how often a rollout batch is trained on
    processes: int = 1  # ranks
    generates: bool = True  # False: rows come from a dataset
    value_model: ModelSize | None = None  # a second model that is trained on the same tokens
    weight_bytes: int = 4  # of a weight, and of an entry of the residual stream
    product_bytes: int = 4  # of an entry that matrix products read or write; 2 under autocast
    matrix_bytes: float | None = None  # of a quantized weight of the layers
    optimizer: str = "adamw_torch_fused"  # value of `optim`
    optimizer_args: str | None = None
    gradient_checkpointing: bool = True
    reference: bool = False  # a reference policy scores rows
    scores_policy: bool = False  # the policy scores rows without gradient
    shared_prefix: bool = True  # one copy of a prompt in a forward
    logits_chunk: int | None = None  # logits held at once; None: the default; 0: all
    generation_rows: int | None = None  # maximum rows generated at once
    generation_kv_gb: float | None = None  # maximum gigabytes of key-value cache
    on_cpu: bool = False  # training runs on a CPU, which has other defaults
    sharding: Sharding = Sharding()
    # Of a weight as it was loaded, if the engine casts it: DeepSpeed and FSDP in half precision.
    loaded_bytes: int | None = None
    divides_quantized: bool = True  # the engine can shard quantized weights
    gathers: bool = True  # all sharded weights are gathered for generation
    # Weights and cache of a generation engine on the same device; 0 if it is on another device.
    # None: the policy itself generates.
    engine_bytes: float | None = None
    engine_sleeps: bool = False  # the engine frees its memory outside generation
    # (examples of a micro-batch, micro-batches of a step) before chunking; None: rollouts.
    examples: tuple[int, int] | None = field(default=None, compare=False)
    chunk_tokens: int = field(default=0, compare=False)  # tokens of each chunk; 0: no chunks

    @classmethod
    def of(cls, args: "OnlineConfig", **facts: Any) -> Self:
        """Read the options of a run; `facts` are fields about model and device, which override."""
        batches = args.batch_plan
        options = {
            "group_size": batches.group_size,
            "completion": args.max_completion_length or 1,
            "micro_batch": batches.micro_batch,
            "slices": batches.micro_batches,
            "accumulation": batches.accumulation,
            "passes": batches.iterations,
            "processes": batches.num_processes,
            "reference": args.beta != 0.0,
            "scores_policy": args.scores_policy,
            "generation_rows": args.generation_max_rows,
            "generation_kv_gb": args.generation_max_kv_gb,
            "gathers": args.ds3_gather_for_generation,
        }
        return cls(**(_of_every_run(args) | options | facts))

    @classmethod
    def of_examples(
        cls, args: "OfflineConfig", answers: int, prompt: int, completion: int, **facts: Any
    ) -> Self:
        """Like `of`, for examples of a dataset: several answers to a prompt, or one document."""
        examples = args.per_device_train_batch_size
        tokens = prompt + answers * completion
        if args.max_tokens_per_micro_batch is not None:
            examples = max(1, min(examples, args.max_tokens_per_micro_batch // tokens))
        options = {
            "group_size": answers,
            "prompt": prompt,
            "completion": completion,
            "micro_batch": answers * examples,
            "processes": args.world_size,
            "generates": False,
            "examples": (examples, args.gradient_accumulation_steps),
            "chunk_tokens": args.piece_tokens,
        }
        return cls(**(_of_every_run(args) | options | facts))._in_chunks()

    def _in_chunks(self) -> Self:
        """Divide the examples of micro-batches into chunks of `chunk_tokens`."""
        if self.examples is None:
            return self
        examples, micro_batches = self.examples
        tokens = self.prompt + self.group_size * self.completion
        chunk_examples = examples
        if self.chunk_tokens:
            chunk_examples = max(1, min(examples, self.chunk_tokens // tokens))
        chunks = micro_batches * -(-examples // chunk_examples)
        rows = self.group_size * chunk_examples
        return self.replace(micro_batch=rows, slices=chunks, accumulation=chunks)

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def of_length(self, tokens: int) -> Self:
        """Return the settings with prompts, or rows of a dataset, of this many tokens."""
        if self.generates:
            return self.replace(prompt=tokens)
        prompt = min(self.prompt, tokens // 2)
        return self.replace(prompt=prompt, completion=tokens - prompt)._in_chunks()

    @property
    def rows(self) -> int:
        """Rows of a rollout batch on one rank."""
        return self.micro_batch * self.slices

    @property
    def is_on_policy(self) -> bool:
        """Whether no update happens between generating a rollout batch and training on it."""
        return self.accumulation % (self.slices * self.passes) == 0

    @property
    def autocast(self) -> bool:
        """Whether operands of matrix products are cast."""
        return self.weight_bytes != self.product_bytes

    def groups(self, rows: int) -> int:
        """Return the most prompts in any `rows` consecutive rows that a micro-batch may have."""
        whole, rest = divmod(rows, self.group_size)
        if rest == 0 or (whole == 0 and self.group_size % rows == 0):
            return max(1, whole)
        return whole + 2

    @property
    def unread(self) -> int:
        """Tokens of shared prompts that skip the MLP of the last layer."""
        if self.gradient_checkpointing or not self.shared_prefix:
            return 0
        return min(self.micro_batch, self.groups(self.micro_batch)) * max(0, self.prompt - 1)

    def forward_passes(self, cuts: bool) -> list[int]:
        """Return the tokens of each forward pass over a micro-batch.

        With `cuts`, a long micro-batch takes several passes, see `packed_layout`.
        """
        rows = self.micro_batch
        if not self.shared_prefix:
            return [rows * (self.prompt + self.completion)]
        prefix = min(rows, self.groups(rows)) * self.prompt
        tail = self.completion - 1  # the last token of a completion predicts nothing
        # With sharded weights a forward is always one pass, so that all ranks run equally many.
        is_one_pass = not cuts or self.sharding.divides_weights or not prefix
        if is_one_pass or prefix + rows * tail <= SHORTEST_PASS or not tail:
            return [-(-(prefix + rows * tail) // self.sharding.per_row)]
        return [prefix, *(count * tail for count in tails_of_passes([tail] * rows, prefix))]


def _of_every_run(args: "BaseConfig") -> dict[str, Any]:
    return {
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "optimizer_args": args.optim_args,
        "gradient_checkpointing": bool(args.gradient_checkpointing),
        "shared_prefix": args.shared_prefix,
        "logits_chunk": args.logits_chunk_size,
    }


def read_sharding(options: Mapping[str, Any]) -> Sharding:
    """Read the sharding from options of `accelerate launch`, by name, such as `zero_stage`.

    They include those of a configuration file. An unknown strategy raises a ValueError.
    """
    if options.get("use_deepspeed"):
        sharding = _zero(options)
    elif options.get("use_fsdp"):
        sharding = _fsdp(options)
    else:
        sharding = Sharding(ranks=options.get("num_processes", 1))
    sizes = [options.get(f"parallelism_config_{name}_size") or 1 for name in ("cp", "sp")]
    return replace(sharding, per_row=max(map(int, sizes)))


def _zero(options: Mapping[str, Any]) -> Sharding:
    zero: dict[str, Any] = {}
    file = options.get("deepspeed_config_file")
    if file not in (None, "none"):
        zero = json.loads(Path(str(file)).read_text(encoding="utf-8")).get("zero_optimization", {})
    stage = int(zero.get("stage", options.get("zero_stage") or 2))

    def entries(name: str, default: int) -> int:
        value = zero.get(name)
        return int(value) if isinstance(value, int | float) else default  # it may be "auto"

    def offloads(tensors: str) -> bool:
        device = zero.get(f"offload_{tensors}", {}).get("device")
        return (device or options.get(f"offload_{tensors}_device") or "none") != "none"

    return Sharding(
        engine="zero",
        stage=stage,
        ranks=options.get("num_processes", 1),
        offloads_optimizer=offloads("optimizer"),
        offloads_weights=stage == WEIGHTS and offloads("param"),
        syncs=True,
        bucket=entries("reduce_bucket_size", Sharding.bucket),
        live=entries("stage3_max_live_parameters", Sharding.live),
        sub_group=entries("sub_group_size", Sharding.sub_group),
    )


def _fsdp(options: Mapping[str, Any]) -> Sharding:
    version = str(options.get("fsdp_version") or 1)
    value = options.get("fsdp_reshard_after_forward")
    if version == "1":
        value = options.get("fsdp_sharding_strategy") or value
    strategy = str("full_shard" if value is None else value).lower()
    if strategy in ("1", "2", "3", "4", "5"):
        strategy = STRATEGIES[int(strategy) - 1]
    if strategy not in STRATEGIES:
        raise ValueError(f"fsdp_sharding_strategy={value}: choose from {', '.join(STRATEGIES)}.")
    offloads = str(options.get("fsdp_offload_params", "false")).lower() == "true"

    def number(name: str) -> int:
        return int(options.get(name) or 1)

    copies = number("num_machines") if strategy.startswith("hybrid") else 1
    copies *= number("parallelism_config_dp_replicate_size")
    return Sharding(
        engine=f"fsdp{version}",
        stage=WHOLE if strategy == "no_shard" else WEIGHTS,
        ranks=max(1, number("num_processes") // copies),
        keeps_weights=strategy not in ("full_shard", "hybrid_shard", "true"),
        offloads_optimizer=offloads,
        offloads_weights=offloads,
    )


def options_of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options for `read_sharding` in a process started by `accelerate launch`."""
    options: dict[str, Any] = {}
    for prefix in ("", "ACCELERATE_", "ACCELERATE_DEEPSPEED_"):
        names = (name for name in environment if name.startswith(prefix))
        options |= {name.removeprefix(prefix).lower(): environment[name] for name in names}
    for name in ("use_deepspeed", "use_fsdp"):
        options[name] = environment.get(f"ACCELERATE_{name.upper()}", "").lower() == "true"
    ranks = int(environment.get("WORLD_SIZE", "1"))
    machines = max(1, ranks // int(environment.get("LOCAL_WORLD_SIZE", str(ranks))))
    return options | {"num_processes": ranks, "num_machines": machines}
