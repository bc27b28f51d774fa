"""Loss curves of fifty updates: the same completions, computed in different ways."""

import io
import itertools
import tempfile
from contextlib import redirect_stdout
from typing import Any

import cases
import one_row
import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from variants import TILE, Variant, make_trainer

STEPS = 50
STEPS_ON_ENGINES = 10
ROWS = 8  # of an update: two prompts
PLAIN = Variant(shared=False, chunk=0)
CLASSES = {
    "micro-batch 1 x accumulation 8": PLAIN.but(micro_batch=1),
    "micro-batch 8 x accumulation 1": PLAIN.but(micro_batch=8),
    "packed": PLAIN.but(shared=True, micro_batch=8),  # two prompts in one row without padding
    "prefix": PLAIN.but(shared=True, micro_batch=4),  # one prompt with its completions
    "fused": PLAIN.but(chunk=TILE, micro_batch=8),  # logits a tile at a time
    "2 ranks": Variant(micro_batch=4, ranks=2),  # all savings on
} | {
    f"2 ranks, {engine}": Variant(micro_batch=4, ranks=2, engine=engine)
    for engine in ("fsdp2", "zero2", "zero3")
}
OPTIMIZERS = {"sgd": 3e-4, "adamw_torch": 1e-3}  # and learning rates


class _Curve(TrainerCallback):
    """Computes the loss of all scripted rows after each update, from full logits."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        groups, loss = cases.groups(), cases.LOSSES["rloo"]
        self.rows = [row for group in groups for row in group]
        credit = [a for group in groups for a in one_row.advantages(loss, group, one_row.Known())]
        self.credit = torch.tensor(credit)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.losses.append(self._loss(others["model"]))

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        """- mean_i A_i log pi(y_i), where the loss that the trainer logs is - mean_i A_i."""
        texts = [torch.tensor(row.prompt + row.completion) for row in self.rows]
        # Later places cannot be seen from earlier ones, so padding behind a row needs no mask.
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        every = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        chosen = every.gather(2, ids[:, 1:, None])[..., 0]
        sums = [
            chosen[i, len(row.prompt) - 1 : len(texts[i]) - 1].sum()
            for i, row in enumerate(self.rows)
        ]
        return float(-(self.credit * torch.stack(sums)).mean())


def steps_of(name: str) -> int:
    """How many updates a class makes."""
    return STEPS if CLASSES[name].engine == "ddp" else STEPS_ON_ENGINES


def curve(name: str, optimizer: str) -> Tensor:
    """Train a class and return its losses, one for each update."""
    variant = CLASSES[name]
    accumulation = ROWS // variant.micro_batch // variant.ranks
    changes = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation,
        "optim": optimizer,
        "learning_rate": OPTIMIZERS[optimizer],
        "max_steps": steps_of(name),
    }
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        trainer = make_trainer(variant, folder, **changes)
        watch = _Curve()
        trainer.add_callback(watch)
        trainer.train()
    return torch.tensor(watch.losses, dtype=torch.float64)


def compare(curves: dict[str, Tensor]) -> tuple[float, float, str]:
    """Largest deviation of two curves and largest mean of their residuals, as shares of the range.

    Returns:
        The deviation, the absolute value of the mean residual, and the pair of the deviation.
    """
    scale = max(float(c.max() - c.min()) for c in curves.values())
    residuals: dict[str, Tensor] = {}
    for one, other in itertools.combinations(curves, 2):
        steps = min(len(curves[one]), len(curves[other]))
        residual = (curves[one][:steps] - curves[other][:steps]) / scale
        residuals[f"{one} - {other}"] = residual
    worst = max(residuals, key=lambda pair: float(residuals[pair].abs().max()))
    means = max(abs(float(residual.mean())) for residual in residuals.values())
    return float(residuals[worst].abs().max()), means, worst
