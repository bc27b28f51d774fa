"""Checkpoints hold the adapter alone, and restore all of it or nothing."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from kinds import KINDS, frozen, independent, same, trained, trainer_of
from test_policies import reference_logps

RUN = {"beta": 0.5, "max_steps": 3, "learning_rate": 0.01, "optim": "adamw_torch"}
SAVING = {"save_strategy": "steps", "save_steps": 1}
WEIGHTS = "adapter_model.safetensors"


def state_of(trainer):
    """What a run ends with: adapter, moments of the optimizer, reference."""
    moments = trainer.optimizer.state_dict()["state"]
    flat = {f"{i} {k}": torch.as_tensor(v) for i, s in moments.items() for k, v in s.items()}
    return trained(trainer.model) | flat | {"reference": reference_logps(trainer)}


@pytest.mark.parametrize(
    "name", ["lora", "dora", "target_parameters", "modules_to_save", "head", "embedding", "4-bit"]
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path, name):
    kind = KINDS[name]
    trainer = trainer_of(kind, tmp_path, **RUN, **SAVING)
    names = {stored_name(n) for n in trained(trainer.model)}
    trainer.train()
    expected, base = state_of(trainer), frozen(trainer.model)
    assert set(load_file(tmp_path / "out" / "checkpoint-3" / WEIGHTS)) == names
    resumed = trainer_of(kind, tmp_path, **RUN)
    assert same(frozen(resumed.model), base)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert resumed.state.global_step == 3
    assert same(state_of(resumed), expected)
    assert same(frozen(resumed.model), base)


def stored_name(name):
    """Files name neither the adapter nor the modules that peft keeps it in."""
    for part in (".modules_to_save.default", ".default"):
        name = name.replace(part, "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def test_a_brought_adapter_is_resumed_with_its_reference(tmp_path):
    """The reference is stored too: here it has moved since the adapter was brought."""
    kind = KINDS["lora"]
    following = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    trainer = trainer_of(kind, tmp_path, model=brought(tmp_path), **RUN, **SAVING, **following)
    start = reference_logps(trainer)
    trainer.train()
    expected = state_of(trainer)
    assert not torch.equal(expected["reference"], start)
    resumed = trainer_of(kind, tmp_path, model=brought(tmp_path), **RUN, **following)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert same(state_of(resumed), expected)


def brought(folder):
    torch.manual_seed(0)
    return independent(KINDS["lora"], folder, {})


def test_an_adapter_is_continued_by_its_name(tmp_path):
    """The folder of an adapter stands for the adapter on the model that it was trained on."""
    kind = KINDS["4-bit"]
    first = trainer_of(kind, tmp_path, **RUN)
    first.train()
    first.save_model(str(tmp_path / "stored"))
    second = trainer_of(
        kind,
        tmp_path,
        model=str(tmp_path / "stored"),
        quantization_config=kind.quantization(),
        **RUN,
    )
    assert same(trained(second.model), trained(first.model))
    start = reference_logps(second)
    second.train()
    assert not same(trained(second.model), trained(first.model))
    assert torch.equal(reference_logps(second), start)
    with pytest.raises(ValueError, match="is an adapter, which will be trained further: leave out"):
        trainer_of(kind, tmp_path, model=str(tmp_path / "stored"), peft_config=kind.config)


def test_a_trainer_refuses_what_does_not_fit(tmp_path):
    """Written without checksums, as by another program, so that only the tensors can tell."""
    kind = KINDS["lora"]
    trainer_of(kind, tmp_path, beta=0.0, **SAVING).train()
    folder = tmp_path / "out" / "checkpoint-1"
    for path in folder.glob("trl_*"):
        path.unlink()
    states = load_file(folder / WEIGHTS)
    name, _ = states.popitem()
    save_file(states, folder / WEIGHTS)
    trainer = trainer_of(kind, tmp_path, beta=0.0)
    start = trained(trainer.model)
    with pytest.raises(ValueError, match=f"missing: {name}"):
        trainer.train(resume_from_checkpoint=str(folder))
    assert same(trained(trainer.model), start)
