"""A reference policy that moves is in checkpoints, and all ranks take it over or none."""

import pytest
import torch
from accelerate import Accelerator
from distributed.engines import call
from online_runs import config, make_trainer, weights
from tiny import save_tiny, tiny_model

from trl.distributed import Ranks
from trl.models.reference import AdapterOff, FrozenCopy, make_reference
from trl.trainer.base.policy import load_reference
from trl.trainer.base.references import REFERENCE_FILE, MovingReference
from trl.trainer.offline.offline_config import PreferenceConfig


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


def test_a_reference_that_is_given_is_not_copied(tmp_path):
    args, policy = config(tmp_path), tiny_model()
    named = load_reference(save_tiny(tmp_path / "model", seed=3), policy, args)
    assert torch.equal(weights(named), weights(tiny_model(seed=3)))
    assert load_reference(named, policy, args) is named
    reference = make_reference(policy, brought_adapter=False, given=named)
    assert reference.model is named
    assert not any(parameter.requires_grad for parameter in named.parameters())
    assert load_reference(None, policy, args) is None


def test_a_reference_by_name_or_loaded(tmp_path):
    name = save_tiny(tmp_path / "ref")
    args = PreferenceConfig(str(tmp_path), use_cpu=True, ref_model_init_kwargs={"dtype": "float16"})
    assert load_reference(None, "model", args) is None
    assert str(load_reference(name, name, args).dtype) == "torch.float16"
    model = tiny_model(attention_dropout=0.5)
    found = load_reference(model, tiny_model(), args)
    assert found is model and found.model.layers[0].self_attn.attention_dropout == 0.0


def test_what_cannot_be_a_reference(tmp_path):
    args, model = PreferenceConfig(str(tmp_path), use_cpu=True), tiny_model()
    with pytest.raises(ValueError, match="ref_model is the model that is trained"):
        load_reference(model, model, args)
    with pytest.raises(TypeError, match="must be a name or a transformers model, not int"):
        load_reference(3, model, args)


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
