"""What decides how much memory a run takes: rows, precision, and what its ranks divide."""

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

ASSUMED_PROMPT = 512  # tokens, where nothing says how long prompts are
WHOLE, OPTIMIZER, GRADIENTS, WEIGHTS = range(4)  # what is divided: that, and all before it

# fsdp_sharding_strategy by number or name, and fsdp_reshard_after_forward.
STRATEGIES = (*map(str.lower, FSDP_SHARDING_STRATEGY), "true", "false")


@dataclass(frozen=True)
class Sharding:
    """Who holds what; defaults are those of DeepSpeed, and of FSDP as accelerate sets it up."""

    engine: str = "ddp"  # or "zero" (DeepSpeed), "fsdp1", "fsdp2"
    stage: int = WHOLE  # WEIGHTS is what FSDP does
    ranks: int = 1  # that divide one copy among them; fewer than all under hybrid sharding
    keeps_weights: bool = False  # gathered weights stay until the backward pass is done
    offloads_optimizer: bool = False  # to the memory of the host
    offloads_weights: bool = False
    syncs: bool = False  # gradients are reduced after each micro-batch; if not, FSDP sums them
    per_row: int = 1  # ranks that divide the tokens of each row (context parallelism)
    bucket: int = 500_000_000  # entries of the buffer in which gradients are reduced
    live: int = 1_000_000_000  # entries of weights that ZeRO-3 keeps gathered
    sub_group: int = 1_000_000_000  # entries that it updates at a time

    @property
    def is_zero(self) -> bool:
        return self.engine == "zero"

    @property
    def is_fsdp(self) -> bool:
        return self.engine.startswith("fsdp")

    @property
    def divides_weights(self) -> bool:
        """Whether a rank holds a part of each weight only."""
        return self.stage >= WEIGHTS

    def share(self, what: int) -> float:
        """The part of it that one rank holds: 1 or 1 / ranks."""
        return 1 / self.ranks if self.stage >= what else 1.0

    @property
    def name(self) -> str:
        """As people call it."""
        if not self.is_fsdp:
            return f"ZeRO-{self.stage}" if self.is_zero else "DDP"
        kept = ", weights kept until the backward pass" if self.keeps_weights else ""
        return f"{self.engine.upper()}{kept if self.stage else ', nothing divided'}"


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
    value_model: ModelSize | None = None  # another model that is trained, on the same tokens
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
    # Examples of a micro-batch, micro-batches of a step, before cuts; None: rows of a round.
    examples: tuple[int, int] | None = field(default=None, compare=False)
    piece: int = field(default=0, compare=False)  # tokens of each cut; 0: none

    @classmethod
    def of(cls, args: "OnlineConfig", **facts: Any) -> Self:
        """What the options of a run say; `facts` of model and device are fields, and win."""
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
        """As `of`, for examples of a dataset: several answers to a prompt, or one document."""
        examples, tokens = args.per_device_train_batch_size, prompt + answers * completion
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
            "piece": args.piece_tokens,
        }
        return cls(**(_of_every_run(args) | options | facts))._in_pieces()

    def _in_pieces(self) -> Self:
        """The same where micro-batches are cut into runs of examples with this many tokens."""
        if self.examples is None:
            return self
        (examples, steps), tokens = self.examples, self.prompt + self.group_size * self.completion
        at_once = max(1, min(examples, self.piece // tokens)) if self.piece else examples
        passes = steps * -(-examples // at_once)
        rows = self.group_size * at_once
        return self.replace(micro_batch=rows, slices=passes, accumulation=passes)

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def of_length(self, tokens: int) -> Self:
        """The same with prompts, or rows of a dataset, of this many tokens."""
        if self.generates:
            return self.replace(prompt=tokens)
        prompt = min(self.prompt, tokens // 2)
        return self.replace(prompt=prompt, completion=tokens - prompt)._in_pieces()

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
        """The most prompts among this many consecutive rows, if groups begin at any micro-batch."""
        whole, rest = divmod(rows, self.group_size)
        if rest == 0 or (whole == 0 and self.group_size % rows == 0):
            return max(1, whole)
        return whole + 2

    @property
    def unread(self) -> int:
        """Tokens of shared prompts for which the last layer keeps nothing of its MLP."""
        if self.gradient_checkpointing or not self.shared_prefix:
            return 0
        return min(self.micro_batch, self.groups(self.micro_batch)) * max(0, self.prompt - 1)

    def forward_passes(self, cuts: bool) -> list[int]:
        """Tokens of each pass over a micro-batch; it `cuts` long ones behind the shared prompts."""
        rows = self.micro_batch
        if not self.shared_prefix:
            return [rows * (self.prompt + self.completion)]
        prefix = min(rows, self.groups(rows)) * self.prompt
        tail = self.completion - 1  # the last token of a completion predicts nothing
        # With sharded weights a forward is always one pass, so that all ranks run as many.
        whole = not cuts or self.sharding.divides_weights or not prefix
        if whole or prefix + rows * tail <= SHORTEST_PASS or not tail:
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
    """What the options of `accelerate launch` mean, under their names there, such as `zero_stage`.

    They include those of a configuration file. An unknown strategy raises a ValueError.
    """
    found = Sharding(ranks=options.get("num_processes", 1))
    if options.get("use_deepspeed") or options.get("use_fsdp"):
        found = _zero(options) if options.get("use_deepspeed") else _fsdp(options)
    sizes = [options.get(f"parallelism_config_{name}_size") or 1 for name in ("cp", "sp")]
    return replace(found, per_row=max(map(int, sizes)))


def _zero(options: Mapping[str, Any]) -> Sharding:
    own: dict[str, Any] = {}
    file = options.get("deepspeed_config_file")
    if file not in (None, "none"):
        own = json.loads(Path(str(file)).read_text(encoding="utf-8")).get("zero_optimization", {})
    names = {"bucket": "reduce_bucket_size", "live": "stage3_max_live_parameters"}
    sizes = {k: own.get(x) for k, x in (names | {"sub_group": "sub_group_size"}).items()}
    # Not those that are "auto".
    entries: dict[str, Any] = {k: int(x) for k, x in sizes.items() if isinstance(x, int | float)}
    stage = int(own.get("stage", options.get("zero_stage") or 2))

    def offloads(what: str) -> bool:
        chosen = own.get(f"offload_{what}", {}).get("device")
        return (chosen or options.get(f"offload_{what}_device") or "none") != "none"

    ranks, to_host = options.get("num_processes", 1), stage == WEIGHTS and offloads("param")
    places = {"offloads_optimizer": offloads("optimizer"), "offloads_weights": to_host}
    return Sharding("zero", stage, ranks, syncs=True, **places, **entries)


def _fsdp(options: Mapping[str, Any]) -> Sharding:
    version = str(options.get("fsdp_version") or 1)
    given = options.get("fsdp_reshard_after_forward")
    if version == "1":
        given = options.get("fsdp_sharding_strategy") or given
    word = str("full_shard" if given is None else given).lower()
    word = STRATEGIES[int(word) - 1] if word in tuple("12345") else word
    if word not in STRATEGIES:
        raise ValueError(f"fsdp_sharding_strategy={given}: choose from {', '.join(STRATEGIES)}.")
    offloads = str(options.get("fsdp_offload_params", "false")).lower() == "true"

    def number(name: str) -> int:
        return int(options.get(name) or 1)

    copies = number("num_machines") if word.startswith("hybrid") else 1
    copies *= number("parallelism_config_dp_replicate_size")
    return Sharding(
        engine=f"fsdp{version}",
        stage=WHOLE if word == "no_shard" else WEIGHTS,
        ranks=max(1, number("num_processes") // copies),
        keeps_weights=word not in ("full_shard", "hybrid_shard", "true"),
        offloads_optimizer=offloads,
        offloads_weights=offloads,
    )


def options_of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options of `read_sharding`, in a process that `accelerate launch` has started."""
    found: dict[str, Any] = {}
    for prefix in ("", "ACCELERATE_", "ACCELERATE_DEEPSPEED_"):
        names = (name for name in environment if name.startswith(prefix))
        found |= {name.removeprefix(prefix).lower(): environment[name] for name in names}
    for name in ("use_deepspeed", "use_fsdp"):
        found[name] = environment.get(f"ACCELERATE_{name.upper()}", "").lower() == "true"
    ranks = int(environment.get("WORLD_SIZE", "1"))
    machines = max(1, ranks // int(environment.get("LOCAL_WORLD_SIZE", str(ranks))))
    return found | {"num_processes": ranks, "num_machines": machines}
