import pytest
import torch
from accelerate import Accelerator
from distributed.engines import call
from online_runs import make_trainer, weights
from tiny import tiny_model
from transformers import TrainerControl, TrainerState

from trl.distributed import Ranks
from trl.models.reference import AdapterOff, FrozenCopy
from trl.trainer.callbacks import (
    REFERENCE_FILE,
    MovingReference,
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


def moving(seed):
    """A reference that moves, and its model."""
    model = tiny_model(seed=seed)
    return MovingReference(FrozenCopy(model), Accelerator(cpu=True)), model


def test_what_is_written_is_read(tmp_path):
    (first, model), (second, other) = moving(1), moving(2)
    first.write(tmp_path, writes=False)
    assert not (tmp_path / REFERENCE_FILE).exists()
    first.write(tmp_path, writes=True)
    second.read(tmp_path, Ranks())
    assert torch.equal(weights(other), weights(model))


def test_a_reference_without_weights_of_its_own_cannot_follow():
    with pytest.raises(NotImplementedError, match="sync_ref_model=True: the reference is the base"):
        MovingReference(AdapterOff(tiny_model()), Accelerator(cpu=True))


def test_a_copy_that_stays_is_in_no_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1, save_strategy="steps", save_steps=1)
    trainer.train()
    assert not (tmp_path / "checkpoint-1" / REFERENCE_FILE).exists()


def work(folder):
    """One of two processes; only the first finds a file."""
    ranks = Ranks(Accelerator(cpu=True))
    reference, model = moving(2)
    if ranks.rank == 0:
        moving(1)[0].write(f"{folder}/0", writes=True)
    reference.read(f"{folder}/{ranks.rank}", ranks)
    return weights(model)


@pytest.mark.distributed
def test_a_rank_without_the_file_keeps_the_others_from_reading_it(tmp_path):
    (tmp_path / "0").mkdir()
    expected = weights(tiny_model(seed=2))
    assert all(torch.equal(found, expected) for found in call(work, tmp_path))
