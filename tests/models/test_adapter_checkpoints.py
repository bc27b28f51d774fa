"""Checkpoints whose adapters fit the model, or do not."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from trl.models.adapter_checkpoints import check_adapters
from trl.models.adapter_files import CONFIG, WEIGHTS
from trl.models.loading import storing_adapters_only
from trl.models.reference import make_reference

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
    make_reference(model, had_adapter=copied)
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
    make_reference(model, had_adapter=True)
    with pytest.raises(ValueError, match=r"Missing: ref; unexpected: none\. 'ref' is the frozen"):
        check_adapters(model, folder)


def test_a_reference_that_nobody_needs_is_named(tmp_path):
    model = adapted()
    make_reference(model, had_adapter=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Missing: none; unexpected: ref"):
        check_adapters(adapted(), tmp_path)


def test_whole_models_and_adapters_are_told_apart(folder, tmp_path):
    with pytest.raises(ValueError, match="holds an adapter, but the model has none"):
        check_adapters(tiny_model(), folder)
    tiny_model().save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="holds no adapter, but the model has one"):
        check_adapters(adapted(), tmp_path / "whole")
    check_adapters(tiny_model(), tmp_path / "whole")
