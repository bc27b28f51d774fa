import re

import torch
from accelerate import Accelerator
from online_runs import dataset, make_trainer, weights
from rich.console import Console
from tiny import tiny_model
from transformers import TrainerControl, TrainerState

from trl.trainer.callbacks import (
    PlainProgressCallback,
    RichProgressCallback,
    SyncRefModelCallback,
)
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


def trained(tmp_path, callback):
    """Two steps whose rewards are 0, with evaluations."""
    trainer = make_trainer(
        tmp_path,
        callbacks=[callback],
        reward=lambda completions, **kwargs: [0.0] * len(completions),
        eval_dataset={"small": dataset(["xy"])},
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=2,
        max_steps=2,
    )
    trainer.train()
    return trainer


EVALUATION = r"step 1/2  evaluation of small:  reward 0  loss \S+  length \d+(\.\d+)?"


def test_progress_bars_end(tmp_path, capsys):
    callback = RichProgressCallback()
    callback._console = Console(force_terminal=True, width=200)
    trained(tmp_path, callback)
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", capsys.readouterr().out)
    assert "training" in shown and "2/2" in shown and "ETA" in shown
    assert "reward 0  loss " in shown
    assert re.search(f"{EVALUATION} *\n", shown)
    assert callback._bars is None


def test_bars_are_closed_at_once(tmp_path):
    callback = RichProgressCallback()
    state = TrainerState(max_steps=3, is_world_process_zero=True)
    args = RLOOConfig(str(tmp_path), use_cpu=True, report_to="none")
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_prediction_step(args, state, TrainerControl())
    callback.close()
    assert callback._bars is None
    callback.close()


def test_plain_lines(tmp_path, capsys):
    trainer = trained(tmp_path, PlainProgressCallback())
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step ")]
    clock = r"\d:\d\d:\d\d elapsed, \d:\d\d:\d\d left"
    expected = [f"step 1/2  {clock}", EVALUATION]
    expected += [rf"step 2/2  reward 0  loss \S+  length \S+  {clock}"]
    expected += [EVALUATION.replace("step 1", "step 2")]
    assert len(lines) == len(expected), lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    assert torch.isfinite(weights(trainer.model)).all()
