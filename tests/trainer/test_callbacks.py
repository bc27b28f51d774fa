import torch
from accelerate import Accelerator
from online import dataset, make_trainer, weights
from tiny import tiny_model
from transformers import TrainerControl, TrainerState

from trl.trainer.callbacks import RichProgressCallback, SyncRefModelCallback
from trl.trainer.rloo_config import RLOOConfig


def test_reference_moves_by_the_mixture_at_the_right_steps():
    policy, reference = tiny_model(seed=1), tiny_model(seed=2)
    callback = SyncRefModelCallback(reference, Accelerator(cpu=True))
    args = RLOOConfig(
        "out", use_cpu=True, ref_model_mixup_alpha=0.25, ref_model_sync_steps=3, report_to="none"
    )
    start, target = weights(reference), weights(policy)
    for step in range(1, 7):
        state = TrainerState(global_step=step)
        callback.on_step_end(args, state, TrainerControl(), model=policy)
        syncs = step // 3
        expected = target + (start - target) * 0.75**syncs
        assert (weights(reference) - expected).abs().max() < 1e-6, step


def test_trainer_syncs_its_reference(tmp_path):
    trainer = make_trainer(
        tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, max_steps=2
    )
    start = weights(trainer.reference.model)
    trainer.train()
    expected = 0.6 * weights(trainer.model) + 0.4 * start
    assert (weights(trainer.reference.model) - expected).abs().max() < 1e-6


def test_progress_bars_end(tmp_path, capsys):
    trainer = make_trainer(
        tmp_path,
        callbacks=[RichProgressCallback()],
        eval_dataset=dataset(["xy"]),
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
    )
    trainer.train()
    shown = capsys.readouterr().out
    assert "training" in shown and "2/2" in shown and "ETA" in shown
    assert torch.isfinite(weights(trainer.model)).all()
