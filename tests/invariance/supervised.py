"""Supervised fine-tuning: the gradient of one update, and the loss of rows scored singly."""

import dataclasses
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import sft_runs
import torch
from cases import MODELS
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

# Prompts and completions of any lengths; two rows have the same prompt, and two are equal.
TEXTS = (
    *(("2+3=", "5"), ("Name the sum of four and three, then stop.", "The sum is 7"), ("ab", "")),
    *(
        ("2+3=", "six, or so they say who cannot count"),
        ("x", "yz"),
        ("x", "yz"),
        ("", "no prompt"),
    ),
    *(("éCount to three:", "1 2 3"), ("a", "b" * 30)),
)
ROWS = len(TEXTS)
WAYS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "one row at a time": {"per_device_train_batch_size": 1},
    "twos, tiles of logits": {"per_device_train_batch_size": 2, "logits_chunk_size": 64},
    "fours, all logits": {"per_device_train_batch_size": 4, "logits_chunk_size": 0},
    "packs of 80": {"packing": True, "max_length": 80, "per_device_train_batch_size": 2},
    "packs of 64, checkpointing": {
        "packing": True,
        "max_length": 64,
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
    },
    "at most 50 tokens": {"max_tokens_per_micro_batch": 50},
    "another order, in threes": {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 3,
    },
    "padded": {"shared_prefix": False},
    "padded to 16, in threes": {
        "shared_prefix": False,
        "pad_to_multiple_of": 16,
        "per_device_train_batch_size": 3,
    },
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"nll": torch.ones_like, "dft": lambda p: p}


@dataclasses.dataclass(frozen=True)
class Supervised:
    """One way of computing the gradient of an update."""

    model: str
    loss: str
    way: str

    def __str__(self) -> str:
        return f"{self.model} | SFT, {self.loss} | {self.way}"

    @property
    def family(self) -> tuple[str, str, str]:
        """Model, loss and layout."""
        layout = "padded rows" if WAYS[self.way].get("shared_prefix") is False else "documents"
        if layout == "documents" and not MODELS[self.model].shares:
            layout = "documents: falls back"
        return self.model, f"SFT, {self.loss}", layout


# Llama in all ways, other models in every third way, each with one of the losses.
VARIANTS = [
    Supervised(model, list(LOSSES)[j // 2 % 2], way)
    for i, model in enumerate(MODELS)
    for j, way in enumerate(WAYS)
    if model == "Llama" or (i + j) % 3 == 0
] + [Supervised("Llama", list(LOSSES)[1 - j // 2 % 2], way) for j, way in enumerate(WAYS)]


class Gradient(TrainerCallback):
    """Keeps the gradient that the optimizer is given."""

    found: Tensor

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All micro-batches are there."""
        grads = [p.grad for p in kwargs["model"].parameters()]
        self.found = torch.cat([grad.detach().clone().flatten() for grad in grads])


def measure(variant: Supervised) -> tuple[float, Tensor, bool]:
    """Train one update on all rows: its loss and gradient, and whether rows lay in one sequence."""
    data = Dataset.from_dict({"prompt": [p for p, _ in TEXTS], "completion": [c for _, c in TEXTS]})
    options = {"per_device_train_batch_size": ROWS} | WAYS[variant.way]
    watch = Gradient()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        trainer = sft_runs.make_trainer(
            folder,
            data,
            model=MODELS[variant.model].build(),
            loss_type=variant.loss,
            gradient_accumulation_steps=ROWS,  # an epoch has no more micro-batches
            callbacks=[watch],
            **options,
        )
        trainer.train()
    return sft_runs.logged(trainer, "loss")[0], watch.found, trainer.scorer.check.enabled


@cache
def reference(model: str, loss: str) -> tuple[float, Tensor]:
    """The same, one row at a time, without padding, from full logits."""
    rows = [sft_runs.encoded(*pair) for pair in TEXTS]
    return sft_runs.by_hand(MODELS[model].build(), rows, LOSSES[loss])[:2]


def difference(variant: Supervised) -> float:
    """Relative difference of gradient or loss, whichever is larger; NaN if the model was padded."""
    loss, gradient, packs = measure(variant)
    expected, wanted = reference(variant.model, variant.loss)
    if variant.family[2] == "documents" and not packs:
        return float("nan")
    apart = float((gradient - wanted).norm() / wanted.norm())
    return max(apart, abs(loss - expected) / abs(expected))
