"""A bias-corrected moving average of the weights (BEMA, arXiv 2508.00180)."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..models.sharded import is_sharded


@dataclass(eq=False)
class BEMACallback(TrainerCallback):
    """Keeps a moving average of the weights, and saves it to `<output_dir>/bema` in the end.

    At step t the average moves by beta_t = max((lag + multiplier t)^-ema_power,
    min_ema_multiplier), and the weights that are saved are

        average + (lag + multiplier t)^-bias_power (weights - first weights)

    Weights that are not trained stay as they are. A resumed run begins a new average. Weights that
    are sharded over ranks are refused when training begins.
    """

    update_freq: int = 400  # steps between two updates
    ema_power: float = 0.5  # 0 takes the weights of the step as their average
    bias_power: float = 0.2  # 0 corrects in full
    lag: int = 10  # how slowly it begins
    update_after: int = 0  # the step whose weights are the first
    multiplier: float = 1.0  # how steps count
    min_ema_multiplier: float = 0.0  # least beta
    device: str = "cpu"  # where the copy lives
    running_model: Any = field(default=None, init=False)
    _first: dict[str, Tensor] = field(default_factory=dict, init=False)
    _average: dict[str, Tensor] = field(default_factory=dict, init=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy the model."""
        model: nn.Module = kwargs["model"]
        if is_sharded(model):
            raise ValueError(
                "BEMACallback needs the weights as a whole: train without FSDP and ZeRO-3."
            )
        self.running_model = copy.deepcopy(model).to(self.device).eval()
        self._begin(model)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the average, if it is time."""
        past = state.global_step - self.update_after
        if past == 0:
            self._begin(kwargs["model"])
        elif past > 0 and past % self.update_freq == 0:
            time = self.lag + self.multiplier * state.global_step
            beta = max(time**-self.ema_power, self.min_ema_multiplier)
            alpha = time**-self.bias_power
            running = dict(self.running_model.named_parameters())
            for name, weight in self._weights(kwargs["model"]).items():
                average = self._average[name].lerp_(weight, beta)
                running[name].copy_(average + alpha * (weight - self._first[name]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the corrected average."""
        if state.is_world_process_zero:
            self.running_model.save_pretrained(Path(args.output_dir, "bema"))

    def _begin(self, model: nn.Module) -> None:
        self._first = self._weights(model)
        self._average = {name: weight.clone() for name, weight in self._first.items()}

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the trained weights, in float32 at least."""
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        kinds = {name: torch.promote_types(p.dtype, torch.float32) for name, p in trained.items()}
        return {name: p.to(self.device, kinds[name], copy=True) for name, p in trained.items()}
