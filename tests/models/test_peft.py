"""Adapters: added, trained, saved and resumed."""

import shutil

import pytest
import torch
from online_runs import dataset, make_trainer
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from trl.models.peft import (
    adapter_base,
    add_adapter,
    continue_adapter,
    is_adapter,
    load_adapter,
)

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "v_proj"]


def lora(**changes):
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": TARGETS} | changes
    )


def test_only_the_adapter_is_trainable():
    """Two layers, two modules in each, two factors of 4 x 32 or 4 x (heads * 8)."""
    model = add_adapter(tiny_model(), lora(), checkpointing=False)
    trainable = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trainable)
    assert len(trainable) == 8
    assert sum(trainable.values()) == 2 * (4 * (32 + 32) + 4 * (32 + 16))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_inputs_require_gradients_only_for_checkpointing(checkpointing):
    model = add_adapter(tiny_model(), lora(), checkpointing)
    embedded = model.get_input_embeddings()(torch.tensor([[10, 11]]))
    assert embedded.requires_grad is checkpointing


def test_what_is_no_config_is_refused():
    with pytest.raises(TypeError, match=r"peft_config must be a peft\.PeftConfig, not dict"):
        add_adapter(tiny_model(), {"r": 4}, False)


def test_a_second_adapter_is_refused():
    model = peft.get_peft_model(tiny_model(), lora())
    with pytest.raises(ValueError, match="already has an adapter"):
        add_adapter(model, lora(), False)


def test_a_frozen_adapter_is_refused():
    model = peft.get_peft_model(tiny_model(), lora(inference_mode=True))
    with pytest.raises(ValueError, match="loaded for inference. .* is_trainable=True"):
        continue_adapter(model, checkpointing=False)


def test_a_stored_adapter_is_found_with_its_model(tmp_path):
    base = save_tiny(tmp_path / "base")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    model.save_pretrained(tmp_path / "adapter")
    name = str(tmp_path / "adapter")
    assert (is_adapter(name), is_adapter(base), is_adapter(str(tmp_path))) == (True, False, False)
    assert adapter_base(name) == (base, None)
    loaded = load_adapter(AutoModelForCausalLM.from_pretrained(base), name)
    assert same(parts(loaded)[0], parts(model)[0])
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == set(parts(model)[0])


def test_an_adapter_that_does_not_say_its_model(tmp_path):
    peft.get_peft_model(tiny_model(), lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not say which model it belongs to"):
        adapter_base(str(tmp_path))


def parts(model):
    """Weights of the adapter and of the base, by name."""
    states = {n: p.detach().clone() for n, p in model.named_parameters()}
    adapter = {n: p for n, p in states.items() if "lora_" in n}
    return adapter, {n: p for n, p in states.items() if n not in adapter}


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def trainer_of(folder, **changes):
    torch.manual_seed(0)  # the first factor of an adapter is drawn at random
    settings = {"beta": 0.5, "peft_config": lora(), "max_steps": 2} | changes
    return make_trainer(folder, **settings)


def test_training_moves_the_adapter_alone(tmp_path):
    trainer = trainer_of(tmp_path)
    adapter, base = parts(trainer.model)
    trainer.train()
    moved, kept = parts(trainer.model)
    assert same(kept, base)
    assert not any(torch.equal(moved[n], adapter[n]) for n in adapter if "lora_B" in n)


def test_the_reference_is_the_policy_without_its_adapter(tmp_path):
    """At the start both are the same to the last bit; then only the policy moves."""
    trainer = trainer_of(tmp_path)
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == 0.0
    assert kl[1] != 0.0
    ids = torch.arange(10, 20)[None]
    trainer.model.eval()
    with torch.no_grad():
        expected = tiny_model().eval()(ids).logits
        with trainer.reference.active() as reference:
            assert torch.equal(reference(ids).logits, expected)
        assert not torch.equal(trainer.model(ids).logits, expected)


def test_a_checkpoint_holds_the_adapter_alone(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    weights = {path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")}
    assert weights - {"training_args.bin"} == {"adapter_model.safetensors"}
    saved = load_file(folder / "adapter_model.safetensors")
    adapter, _ = parts(trainer.model)
    assert same(saved, {name.replace(".default", ""): p for name, p in adapter.items()})
    loaded = peft.PeftModel.from_pretrained(tiny_model(), folder).eval()
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_resuming_continues_the_adapter(tmp_path):
    many = dataset([f"{chr(97 + i)}{i}" for i in range(12)])
    settings = {"data": many, "max_steps": 5, "optim": "adamw_torch", "learning_rate": 0.01}
    whole = trainer_of(tmp_path / "whole", **settings)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(tmp_path / "parts", **settings, **saving).train()
    for name in ("checkpoint-4", "checkpoint-5"):
        shutil.rmtree(tmp_path / "parts" / name, ignore_errors=True)
    resumed = trainer_of(tmp_path / "parts", **settings)
    start, _ = parts(resumed.model)
    resumed.train(resume_from_checkpoint=True)
    (adapter, base), (expected, expected_base) = parts(resumed.model), parts(whole.model)
    assert resumed.state.global_step == 5
    assert same(adapter, expected)
    assert same(base, expected_base)
    assert not same(adapter, start)


def test_an_adapter_brought_along_is_its_own_reference(tmp_path):
    """The reference is the policy as it came, adapter included, not the base model."""
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model(), lora(init_lora_weights=False)).eval()
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        came = model(ids).logits
        with model.disable_adapter():
            assert not torch.equal(model(ids).logits, came)
    trainer = make_trainer(tmp_path, model=model, beta=0.5, max_steps=2)
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == 0.0
    assert kl[1] != 0.0
    trainer.model.eval()
    with torch.no_grad(), trainer.reference.active() as reference:
        assert torch.equal(reference(ids).logits, came)
    assert not torch.equal(trainer.model(ids).logits, came)
