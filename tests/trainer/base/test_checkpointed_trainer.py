"""What a resumed run takes over from its checkpoint, besides weights."""

import pytest
import torch
from sft_runs import make_trainer, weights


def test_a_logged_mean_goes_on_over_a_checkpoint(tmp_path):
    """The log after update 3 is of updates 1 to 3; a process that ended made the first two."""
    changes = {"logging_steps": 3, "max_steps": 3, "per_device_train_batch_size": 2}
    whole = make_trainer(tmp_path / "whole", save_strategy="steps", save_steps=2, **changes)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **changes)
    output = resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    logs = [trainer.state.log_history[0] for trainer in (whole, resumed)]
    for name in ("loss", "entropy", "mean_token_accuracy", "grad_norm", "num_tokens"):
        assert logs[0][name] == logs[1][name], name
    assert torch.equal(weights(whole.model), weights(resumed.model))
    # What `train` returns is of the one update of its own call.
    assert output.training_loss == pytest.approx(
        3 * logs[0]["loss"] - first_two(tmp_path), rel=1e-5
    )


def first_two(folder):
    """The sum of the losses of the first two updates."""
    changes = {"logging_steps": 1, "max_steps": 2, "per_device_train_batch_size": 2}
    trainer = make_trainer(folder / "two", **changes)
    trainer.train()
    return sum(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
