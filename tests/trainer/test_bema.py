from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from sft_runs import make_trainer
from torch import nn

from trl.trainer.callbacks import BEMACallback


class One(nn.Module):
    """One weight, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.fixed = nn.Parameter(torch.full((1,), 7.0), requires_grad=False)


def test_known_values():
    """A weight that is t at step t."""
    model, callback = One(), BEMACallback(update_freq=2, update_after=1)
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    callback.on_train_begin(None, state, None, model=model)
    found = {}
    for step in range(1, 6):
        state.global_step = step
        model.weight.data.fill_(step)
        callback.on_step_end(None, state, None, model=model)
        found[step] = callback.running_model.weight.item()
    assert found == pytest.approx({1: 0, 2: 0, 3: 2.752106, 4: 2.752106, 5: 4.771516}, abs=1e-6)
    assert callback.running_model.fixed.item() == 7.0


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2)], ids=["all", "lora"])
def test_a_run_saves_the_average(tmp_path, adapter):
    callback = BEMACallback(update_freq=1, ema_power=0.0, bias_power=1e3)  # the weights themselves
    trainer = make_trainer(tmp_path, callbacks=[callback], peft_config=adapter, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    name = "model.safetensors" if adapter is None else "adapter_model.safetensors"
    saved, last = (load_file(tmp_path / folder / name) for folder in ("bema", "last"))
    assert saved.keys() == last.keys()
    for key, weight in saved.items():
        torch.testing.assert_close(weight, last[key], rtol=0, atol=1e-6)
