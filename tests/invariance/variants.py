"""Every way of computing one and the same gradient, and the gradient that each of them gives."""

import copy
import dataclasses
import io
import itertools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any

import cases
import one_row
import peft
import torch
from cases import EOS, FEW, LOSSES, MODELS, OF_GROUPS, ORDERS, OTHERS, STATISTICS, TEXTS
from datasets import Dataset
from forced import conditions
from online_runs import config
from ppo_runs import fill
from scripted import ScriptedBackend
from tiny import tiny_tokenizer
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from trl.models.packed_attention import KEYWORD
from trl.models.reference import load_weights, whole_weights
from trl.models.unwrap import causal_model
from trl.models.value_model import add_value_model
from trl.trainer.ppo_trainer import PPOTrainer

TILE = 1500  # logits: 23 tokens x 65 of the 95 vocabulary entries


@dataclass(frozen=True)
class Variant:
    """One way of computing the gradient of an update."""

    model: str = "Llama"
    loss: str = "rloo"
    shared: bool = True  # prompts computed once
    passes: bool = False  # over a part of the tokens; with gradient checkpointing, which they need
    micro_batch: int = 4  # rows of one forward; the rest is accumulated
    tokens: int | None = None  # of a forward, into which micro-batches are cut; None: whole
    rounds: int = 1  # generation rounds of the update
    chunk: int | None = None  # logits held at once
    pad_multiple: int | None = None  # of both widths of plain rows
    padding: str = "pad"  # what fills plain rows, and follows the end in what an engine writes
    order: int = 0  # of groups, and of rows in a group
    skip: bool = True  # rows of zero advantage
    checkpointing: bool = False
    logs: bool = False  # entropies are computed for metrics
    ranks: int = 1
    engine: str = "ddp"  # of several ranks
    lora: bool = False
    precision: str = "float32"
    single_zeros: bool = True  # single rows of zero advantage, besides a whole group

    def __str__(self) -> str:
        default = dataclasses.asdict(Variant())
        changed = {k: v for k, v in dataclasses.asdict(self).items() if v != default[k]}
        named = [self.model, self.loss, "shared" if self.shared else "plain"]
        rest = [f"{k}={v}" for k, v in changed.items() if k not in ("model", "loss", "shared")]
        return " | ".join(named + rest).replace("[", "").replace("]", "")

    def but(self, **changes: Any) -> "Variant":
        """The same with some changes."""
        return dataclasses.replace(self, **changes)

    @property
    def family(self) -> tuple[str, str, bool, bool]:
        """Model, algorithm and layout."""
        return self.model, LOSSES[self.loss].family, self.shared, self.passes

    @property
    def accumulation(self) -> int:
        """Micro-batches of the update on one rank."""
        return LOSSES[self.loss].size * len(TEXTS) // self.micro_batch // self.ranks

    @property
    def is_possible(self) -> bool:
        """Whether the update can be cut like that."""
        loss = LOSSES[self.loss]
        unit = loss.trainer.config_class.unit  # rows that are never parted
        if self.micro_batch % unit or not self.accumulation:
            return False
        if self.accumulation % self.rounds or (self.rounds > 1 and loss.second_pass):
            return False
        if self.lora and loss.option("beta"):
            return False  # the reference would be the model without its adapter
        # A single completion is all prefix.
        shares = self.shared and MODELS[self.model].shares
        return not self.passes or (shares and self.micro_batch > 1 and self.tokens is None)

    @property
    def is_mixed(self) -> bool:
        """Whether a forward has rows with a gradient and rows without one."""
        return self.micro_batch > (1 if self.single_zeros else LOSSES[self.loss].size)


@dataclass(frozen=True)
class Measured:
    """What a run gave, and how it got there."""

    gradient: Tensor
    tokens: int  # of forwards with gradient
    shared: bool  # whether all of them had shared prompts
    in_passes: bool  # whether some of them were cut


LARGE = 1e3  # a learning rate at which weights before an update are lost in rounding


class _Watch(TrainerCallback):
    """Keeps the last gradient an optimizer was about to use, and looks at the forwards."""

    def __init__(self, model: nn.Module, keeps: bool):
        self.gradient = torch.empty(0)
        self.keeps = keeps
        self.tokens = self.decodings = 0
        self.packed: list[bool] = []
        model.register_forward_pre_hook(self._look, with_kwargs=True)
        causal_model(model).base_model.register_forward_pre_hook(self._count)

    def _look(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.packed.append(kwargs.get(KEYWORD) is not None)
            self.tokens += kwargs["input_ids"].numel()

    def _count(self, decoder: nn.Module, args: Any) -> None:
        self.decodings += torch.is_grad_enabled()

    @property
    def measured(self) -> Measured:
        """What was seen."""
        in_passes = self.decodings > len(self.packed)
        return Measured(self.gradient, self.tokens, all(self.packed), in_passes)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.keeps:
            self.gradient = flat_gradient(others["model"])


def flat_gradient(model: nn.Module) -> Tensor:
    """All gradients in a row, float32; 0 where there is none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    return torch.cat([grad.flatten().float() for grad in found])


def measure(
    variant: Variant, prepare: Callable[[Any], None] = lambda trainer: None, **changes: Any
) -> Measured:
    """Train one update (two, if the loss has a second pass) and return its gradient.

    Args:
        prepare: changes the trainer before it runs.
        changes: options of the trainer that are unlike those of the variant.
    """
    applied = variant.ranks > 1 and variant.engine != "ddp"
    if applied:
        changes = {"learning_rate": LARGE} | changes
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        conditions(variant.passes, variant.padding == "junk"),
    ):
        trainer = make_trainer(variant, folder, **changes)
        watch = _Watch(trainer.model, keeps=not applied)
        trainer.add_callback(watch)
        prepare(trainer)
        trainer.train()
    if applied:
        watch.gradient = applied_gradient(trainer, variant)
    return watch.measured


def applied_gradient(trainer: Any, variant: Variant) -> Tensor:
    """The gradient of an update by plain SGD, from what it did to the weights.

    Engines keep gradients in places of their own. Empty on all ranks but the first.
    """
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return torch.empty(0)
    before = initial(variant.model, variant.precision, variant.lora)
    add_values(before, variant.model, LOSSES[variant.loss])
    trained = ((name, p) for name, p in before.named_parameters() if p.requires_grad)
    moved = [(p.detach() - state[name]).flatten() for name, p in trained]
    return torch.cat(moved).float() / trainer.args.learning_rate


def make_trainer(variant: Variant, folder: str, **changes: Any) -> Any:
    """The real trainer of a variant, over scripted completions."""
    loss = LOSSES[variant.loss]
    prompts = [list(TEXTS)[i] for i in ORDERS[variant.order]]
    trainer = loss.trainer(
        model=initial(variant.model, variant.precision, variant.lora),
        reward_funcs=cases.Reward(variant.single_zeros),
        args=config(folder, loss.trainer.config_class, **(options(variant) | changes)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(variant),
        **({"value_model": cases.classifier(variant.model)} if loss.classifies else {}),
    )
    if loss.trainer is PPOTrainer and not loss.classifies:
        fill(causal_model(trainer.model).value_model)
    trainer.remove_callback(PrinterCallback)
    trainer.backend = ScriptedBackend(
        cases.script(variant.order, variant.padding == "junk", loss.size),
        lambda count: trainer.ranks.rank * count,
    )
    if trainer.reference is not None:
        state = whole_weights(trainer.reference.model)
        scaled = {name: weight * cases.REFERENCE_SCALE for name, weight in state}
        load_weights(trainer.reference.model, scaled)
    return trainer


def options(variant: Variant) -> dict[str, Any]:
    """The options of a trainer that make a variant."""
    loss = LOSSES[variant.loss]
    passes = 2 if loss.second_pass else 1
    return loss.options | {
        "shared_prefix": variant.shared,
        "per_device_train_batch_size": variant.micro_batch // loss.trainer.config_class.unit,
        "gradient_accumulation_steps": variant.accumulation,
        "steps_per_generation": variant.accumulation // variant.rounds,
        "logits_chunk_size": variant.chunk,
        "max_tokens_per_piece": variant.tokens,
        "pad_to_multiple_of": variant.pad_multiple,
        "skip_zero_advantages": variant.skip,
        "gradient_checkpointing": variant.checkpointing or variant.passes,
        "logging_steps": 1 if variant.logs else 1000,
        "bf16": variant.precision == "bf16 autocast",
        "use_cpu": variant.ranks == 1,  # else the engine says
        "num_generations": loss.size,
        "max_completion_length": cases.MOST_TOKENS,
        "num_iterations": passes,
        "max_steps": passes,
        "learning_rate": loss.learning_rate,
        "log_memory": False,
        "reward_dry_run": False,
    }


@cache
def _built(model: str) -> nn.Module:
    return MODELS[model].build()


def initial(model: str, precision: str = "float32", lora: bool = False) -> nn.Module:
    """A fresh copy of a model, with an adapter if asked for."""
    fresh = copy.deepcopy(_built(model))
    fresh = fresh.bfloat16() if precision == "bf16 weights" else fresh
    if not lora:
        return fresh
    torch.manual_seed(1)
    return peft.get_peft_model(
        fresh, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )


def add_values(policy: nn.Module, model: str, loss: cases.Loss) -> None:
    """Add the value model that the trainer of a loss adds, for the reference."""
    if loss.trainer is PPOTrainer:
        given = cases.classifier(model) if loss.classifies else None
        add_value_model(policy, given, torch.device("cpu"))
        if given is None:
            fill(causal_model(policy).value_model)


def tokenizer(variant: Variant) -> Any:
    """The tokenizer; its padding must not matter."""
    found = tiny_tokenizer()
    if variant.padding == "eos":
        found.pad_token = found.convert_ids_to_tokens(EOS)
    return found


# --- The reference ---


def reference(variant: Variant) -> Tensor:
    """The gradient by definition, in float32 from the weights the variant has."""
    return _reference(_Key.of(variant))


def reference_in(variant: Variant) -> Tensor:
    """The gradient by definition, computed in the variant's own precision."""
    autocast = variant.precision == "bf16 autocast"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model = initial(variant.model, variant.precision, variant.lora)
        return _Key.of(variant).gradient(model)


@dataclass(frozen=True)
class _Key:
    """All that the gradient may depend on."""

    model: str
    loss: str
    single_zeros: bool
    rounds: tuple[tuple[int, ...], ...]  # groups of each
    weights: str
    lora: bool

    @classmethod
    def of(cls, variant: Variant) -> "_Key":
        order = ORDERS[0 if variant.rounds == 1 else variant.order]
        size = len(order) // variant.rounds
        rounds = tuple(order[i : i + size] for i in range(0, len(order), size))
        weights = "bf16 weights" if variant.precision == "bf16 weights" else "float32"
        return cls(variant.model, variant.loss, variant.single_zeros, rounds, weights, variant.lora)

    def gradient(self, model: nn.Module) -> Tensor:
        groups = cases.groups(self.single_zeros)
        parts = [[groups[i] for i in members] for members in self.rounds]
        add_values(model, self.model, LOSSES[self.loss])
        return one_row.gradient(model, LOSSES[self.loss], parts)


@cache
def _reference(key: _Key) -> Tensor:
    return key.gradient(initial(key.model, key.weights, key.lora).float())


def is_as_expected(variant: Variant, measured: Measured) -> bool:
    """Whether prompts were shared, and passes made, where the variant and its model say so."""
    shared = variant.shared and MODELS[variant.model].shares
    return (measured.shared, measured.in_passes) == (shared, variant.passes)


def difference(gradient: Tensor, expected: Tensor) -> float:
    """||gradient - expected|| / ||expected||."""
    return float((gradient - expected).norm() / expected.norm())


# --- Which variants ---

Dimensions = Mapping[str, Sequence[Any]]
DIMENSIONS: Dimensions = {
    "model": tuple(MODELS),
    "loss": tuple(OF_GROUPS),
    "shared": (True, False),
    "passes": (False, True),
    "micro_batch": (1, 2, 4, 8, 16),
    "rounds": (1, 2),
    "chunk": (None, 0, TILE),
    "pad_multiple": (None, 8, 64),
    "padding": ("pad", "eos", "junk"),
    "order": (0, 1, 2),
    "skip": (True, False),
    "checkpointing": (False, True),
    "logs": (False, True),
    "lora": (False, True),
}
# A pair stays as it is where its completions are turned round by two.
OTHER_DIMENSIONS = DIMENSIONS | {
    "model": FEW,
    "loss": tuple(OTHERS),
    "micro_batch": (1, 2, 4, 8),
    "chunk": (None, TILE),
    "pad_multiple": (None, 8),
    "order": (0, 2),
    "skip": (True,),
    "logs": (False,),
}
# Losses that read statistics, in forwards of parts of what these are taken over.
STATISTIC_DIMENSIONS: Dimensions = {
    "model": ("Llama", "Gemma3, soft-capped logits"),
    "loss": (*STATISTICS, "dapo, entropy bonus", "ppo", "ppo, whitened rewards"),
    "shared": (True, False),
    "micro_batch": (2, 4, 16),
    "tokens": (None, 1, 40),
    "rounds": (1, 2),
    "order": (0, 2),
    "skip": (True, False),
}


def possible_pairs(dimensions: Dimensions) -> set:
    """All pairs of (dimension, value) that do not contradict each other."""
    values = [[(name, value) for value in dimensions[name]] for name in dimensions]
    every = (
        pair
        for one, other in itertools.combinations(values, 2)
        for pair in itertools.product(one, other)
    )
    return {pair for pair in every if Variant(**dict(pair)).is_possible}


def covering(dimensions: Dimensions, seed: int = 0) -> list[Variant]:
    """Few variants among which every possible pair of values of two dimensions occurs."""
    generator = random.Random(seed)
    missing = possible_pairs(dimensions)
    found: list[Variant] = []
    while missing:
        # Each candidate has one missing pair for certain.
        wanted = sorted(missing, key=repr)
        drawn = [draw(dimensions, generator, generator.choice(wanted)) for _ in range(60)]
        candidates = [variant for variant in drawn if variant is not None]
        if candidates:
            families = {variant.family for variant in found}
            found.append(
                max(
                    candidates,
                    key=lambda v: (len(pairs(v, dimensions) & missing), _interest(v, families)),
                )
            )
            missing -= pairs(found[-1], dimensions)
    return found


def _interest(variant: Variant, families: set) -> tuple[bool, bool, int]:
    """Among equals: new families, passes, which have most that can go wrong, and few forwards."""
    return variant.family not in families, variant.passes, variant.micro_batch


def pairs(variant: Variant, dimensions: Dimensions) -> set:
    """All pairs of (dimension, value) of a variant."""
    values = [(name, getattr(variant, name)) for name in dimensions]
    return set(itertools.combinations(values, 2))


def draw(dimensions: Dimensions, generator: random.Random, fixed: tuple = ()) -> Variant | None:
    """A random variant with some values given; None if they contradict each other."""
    chosen = {name: generator.choice(values) for name, values in dimensions.items()}
    variant = Variant(**(chosen | dict(fixed)))
    return variant if variant.is_possible else None
