"""KTO, reward models and DPO: the gradient of one update, and the loss of rows scored singly."""

import dataclasses
import io
import tempfile
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import dpo_runs
import kto_runs
import reward_runs
import sft_runs
import torch
from cases import FEW, MODELS, REFERENCE_SCALE, classifier
from supervised import Gradient
from torch import Tensor, nn

BETA = 0.1
WAYS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "one row at a time": {"per_device_train_batch_size": 1},
    "threes, tiles of logits": {"per_device_train_batch_size": 3, "logits_chunk_size": 64},
    "twos, checkpointing": {"per_device_train_batch_size": 2, "gradient_checkpointing": True},
    "at most 60 tokens": {"max_tokens_per_micro_batch": 60},
    "pieces of 60 tokens": {"max_tokens_per_piece": 60},
    "threes, in pieces of one": {"per_device_train_batch_size": 3, "max_tokens_per_piece": 1},
    "another order, in twos": {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
    },
    "padded": {"shared_prefix": False},
    "padded to 16, in threes": {
        "shared_prefix": False,
        "pad_to_multiple_of": 16,
        "per_device_train_batch_size": 3,
    },
}
LOSSES = ("KTO", "reward", "reward, ranked", "DPO", "DPO, aot", "DPO, aot_unpaired")
POLICIES: dict[str, Any] = dict.fromkeys(LOSSES[3:], dpo_runs) | {"KTO": kto_runs}


@dataclasses.dataclass(frozen=True)
class Preferences:
    """One way of computing the gradient of an update."""

    model: str
    loss: str
    way: str

    def __str__(self) -> str:
        return f"{self.model} | {self.loss} | {self.way}"

    @property
    def family(self) -> tuple[str, str, str]:
        """Model, loss and layout."""
        is_padded = WAYS[self.way].get("shared_prefix") is False
        shared = "shared prefix" if MODELS[self.model].shares else "shared prefix: falls back"
        return self.model, self.loss, "padded rows" if is_padded else shared


# Llama in all ways, other models in every third one.
VARIANTS = [
    Preferences(model, loss, way)
    for i, model in enumerate(FEW)
    for j, loss in enumerate(LOSSES)
    for k, way in enumerate(WAYS)
    if model == "Llama" or (i + j + k) % 3 == 0
]


def _trainer(folder: str, variant: Preferences, **options: Any) -> Any:
    if variant.loss in POLICIES:
        model, reference = (MODELS[variant.model].build() for _ in range(2))
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(REFERENCE_SCALE)
        options |= {"model": model, "ref_model": reference, "beta": BETA}
        if "aot" in variant.loss:
            options["loss_type"] = variant.loss.removeprefix("DPO, ")
        return POLICIES[variant.loss].make_trainer(folder, **options)
    data = reward_runs.ranked() if "ranked" in variant.loss else reward_runs.pairs()
    options |= {"model": classifier(variant.model), "center_rewards_coefficient": 0.01}
    return reward_runs.make_trainer(folder, data, **options)


def measure(variant: Preferences) -> tuple[float, Tensor, bool]:
    """Train one update on all rows: its loss and gradient, and whether prompts were shared."""
    watch = Gradient()
    options = {"gradient_accumulation_steps": 8, "callbacks": [watch]} | WAYS[variant.way]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        trainer = _trainer(folder, variant, **options)
        trainer.train()
    return sft_runs.logged(trainer, "loss")[0], watch.found, trainer.scorer.check.enabled


@cache
def reference(model: str, loss: str) -> tuple[float, Tensor]:
    """The same, one row at a time, without padding, from full logits or states."""
    if loss not in POLICIES:
        rows = reward_runs.as_pairs() if "ranked" in loss else reward_runs.PAIRS
        return reward_runs.by_hand(classifier(model), rows, centering=0.01)[:2]
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, Preferences(model, loss, ""))
    if loss != "KTO":
        return dpo_by_hand(trainer.model, trainer.reference.model, loss)
    partners = kto_runs.partners_of(trainer)
    return kto_runs.by_hand(trainer.model, trainer.reference.model, partners, beta=BETA)[:2]


def dpo_by_hand(model: nn.Module, reference: nn.Module, loss: str) -> tuple[float, Tensor]:
    """Mean loss of pairs and its gradient, one row at a time."""
    rows = [(prompt, answer) for prompt, *answers in dpo_runs.PAIRS for answer in answers]
    with torch.no_grad():
        held = torch.stack([kto_runs.log_prob(reference, *row) for row in rows]).view(-1, 2)
    logps = torch.stack([kto_runs.log_prob(model, *row) for row in rows]).view(-1, 2)
    chosen, rejected = (logps - held).unbind(1)
    margins = {
        "DPO": lambda: chosen - rejected,
        "DPO, aot": lambda: in_order(logps[:, 0] - logps[:, 1]) - in_order(held[:, 0] - held[:, 1]),
        "DPO, aot_unpaired": lambda: in_order(chosen) - in_order(rejected),
    }[loss]()
    value = -nn.functional.logsigmoid(BETA * margins).mean()
    model.zero_grad()
    value.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return float(value.detach()), gradient


def in_order(values: Tensor) -> Tensor:
    """Values (N,), the smallest first."""
    return values.sort().values


def difference(variant: Preferences) -> float:
    """Relative difference of gradient or loss, the larger; NaN if prompts were not shared."""
    loss, gradient, shares = measure(variant)
    expected, wanted = reference(variant.model, variant.loss)
    if variant.family[2] == "shared prefix" and not shares:
        return float("nan")
    apart = float((gradient - wanted).norm() / wanted.norm())
    return max(apart, abs(loss - expected) / abs(expected))
