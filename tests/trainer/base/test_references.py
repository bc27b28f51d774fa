"""A reference policy that moves is in checkpoints, and all ranks take it over or none."""

import pytest
import torch
from accelerate import Accelerator
from distributed.engines import call
from online_runs import config, make_trainer, weights
from tiny import save_tiny, tiny_model

from trl.distributed import Ranks
from trl.models.reference import AdapterOff, FrozenCopy, make_reference
from trl.trainer.base.references import (
    REFERENCE_FILE,
    follower,
    load_reference,
    read_reference,
    write_reference,
)


def test_what_is_written_is_read(tmp_path):
    first, second = FrozenCopy(tiny_model(seed=1)), FrozenCopy(tiny_model(seed=2))
    write_reference(first, tmp_path, writes=False)
    assert not (tmp_path / REFERENCE_FILE).exists()
    write_reference(first, tmp_path, writes=True)
    read_reference(second, tmp_path, Ranks())
    assert torch.equal(weights(second.model), weights(first.model))


def test_a_reference_that_is_given_is_not_copied(tmp_path):
    args, policy = config(tmp_path), tiny_model()
    named = load_reference(save_tiny(tmp_path / "model", seed=3), policy, args)
    assert torch.equal(weights(named), weights(tiny_model(seed=3)))
    assert load_reference(named, policy, args) is named
    reference = make_reference(policy, brought_adapter=False, given=named)
    assert reference.model is named
    assert not any(parameter.requires_grad for parameter in named.parameters())
    assert load_reference(None, policy, args) is None


def test_a_reference_without_weights_of_its_own_cannot_follow():
    with pytest.raises(NotImplementedError, match="sync_ref_model=True: the reference is the base"):
        follower(AdapterOff(tiny_model()), None)


def test_a_copy_that_stays_is_in_no_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1, save_strategy="steps", save_steps=1)
    trainer.train()
    assert not (tmp_path / "checkpoint-1" / REFERENCE_FILE).exists()


def work(folder):
    """One of two processes; only the first finds a file."""
    ranks = Ranks(Accelerator(cpu=True))
    reference = FrozenCopy(tiny_model(seed=2))
    if ranks.rank == 0:
        write_reference(FrozenCopy(tiny_model(seed=1)), f"{folder}/0", writes=True)
    read_reference(reference, f"{folder}/{ranks.rank}", ranks)
    return weights(reference.model)


@pytest.mark.distributed
def test_a_rank_without_the_file_keeps_the_others_from_reading_it(tmp_path):
    (tmp_path / "0").mkdir()
    expected = weights(tiny_model(seed=2))
    assert all(torch.equal(found, expected) for found in call(work, tmp_path))
