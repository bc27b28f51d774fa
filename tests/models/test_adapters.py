"""Adapters: added, trained, saved and resumed."""

import json
import shutil
import warnings

import pytest
import torch
from online_runs import dataset, make_trainer
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from trl.models.adapters import (
    CONFIG,
    WEIGHTS,
    adapter_base,
    add_adapter,
    check_adapters,
    continue_adapter,
    is_adapter,
    load_adapter,
    storing_adapters_only,
)
from trl.models.reference import make_reference

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


def test_adapters_come_without_warnings_that_users_can_do_nothing_about(tmp_path):
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        add_adapter(tiny_model(), lora(), checkpointing=False).save_pretrained(tmp_path)
        load_adapter(tiny_model(), str(tmp_path))
    assert not [x for x in heard if "is_gradient_checkpointing" in str(x.message)]
    assert warnings.filters == before


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


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


def adapted(base=None, **changes):
    settings = {"target_modules": ["q_proj"], "r": 4, "lora_alpha": 8} | changes
    return peft.get_peft_model(base or tiny_model(), peft.LoraConfig(**settings))


@pytest.fixture
def folder(tmp_path):
    adapted().save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    states = load_file(folder / WEIGHTS)
    change(states)
    save_file(states, folder / WEIGHTS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "embed_tokens"], "task_type": "CAUSAL_LM"},
        {"target_modules": ["lm_head", "embed_tokens"], "task_type": "CAUSAL_LM"},
    ],
    ids=["lora", "dora", "modules to save", "ends"],
)
@pytest.mark.parametrize("copied", [False, True])
def test_what_was_stored_fits(tmp_path, changes, copied):
    model = adapted(**changes)
    make_reference(model, brought_adapter=copied)
    with storing_adapters_only(model):
        model.save_pretrained(tmp_path)
    check_adapters(model, tmp_path)
    assert (tmp_path / "ref" / WEIGHTS).exists() == copied


@pytest.mark.parametrize("grown", [False, True])
def test_the_matrix_below_an_adapter_is_stored_if_it_has_grown(tmp_path, grown):
    base = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "base"))
    if grown:
        base.resize_token_embeddings(base.config.vocab_size + 8)
    model = adapted(base, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with storing_adapters_only(model):
        model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    assert any("base_layer" in name for name in stored) is grown
    check_adapters(model, tmp_path)
    assert "save_pretrained" not in vars(model)


def test_missing_tensors_are_named(folder):
    edit(folder, lambda states: states.pop(NAME))
    with pytest.raises(ValueError, match=f"does not fit the adapter of the model. missing: {NAME}"):
        check_adapters(adapted(), folder)


def test_unexpected_tensors_are_named(folder):
    edit(folder, lambda states: states.update({NAME + "s": torch.zeros(2)}))
    with pytest.raises(ValueError, match=f"model. unexpected: {NAME}s .2.."):
        check_adapters(adapted(), folder)


def test_tensors_of_another_shape_are_named(folder):
    edit(folder, lambda states: states.update({NAME: torch.zeros(32, 2)}))
    with pytest.raises(ValueError, match=r"missing: (\S+) \(32x4\); unexpected: \1 \(32x2\)\.$"):
        check_adapters(adapted(), folder)


def test_only_the_first_of_many_are_named(folder):
    model = adapted(use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"missing: (\S+ \S+, ){4}\S+ \S+ and 33 more\.$"):
        check_adapters(model, folder)


@pytest.mark.parametrize(("option", "value"), [("lora_alpha", 16), ("use_rslora", True)])
def test_another_scale_is_named(folder, option, value):
    """Tensors of the same shape would do something else."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {option: value}))
    with pytest.raises(ValueError, match=f"{option} is {value!r}, but"):
        check_adapters(adapted(), folder)


def test_a_file_that_is_not_there_is_named(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="adapter_model.safetensors is missing from"):
        check_adapters(adapted(), folder)


def test_a_reference_that_is_not_there_is_named(folder):
    model = adapted()
    make_reference(model, brought_adapter=True)
    with pytest.raises(ValueError, match=r"Missing: ref; unexpected: none\. 'ref' is the frozen"):
        check_adapters(model, folder)


def test_a_reference_that_nobody_needs_is_named(tmp_path):
    model = adapted()
    make_reference(model, brought_adapter=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Missing: none; unexpected: ref"):
        check_adapters(adapted(), tmp_path)


def test_whole_models_and_adapters_are_told_apart(folder, tmp_path):
    with pytest.raises(ValueError, match="holds an adapter, but the model has none"):
        check_adapters(tiny_model(), folder)
    tiny_model().save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="holds no adapter, but an adapter is trained"):
        check_adapters(adapted(), tmp_path / "whole")
    check_adapters(tiny_model(), tmp_path / "whole")
