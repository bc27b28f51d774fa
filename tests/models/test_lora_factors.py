"""Base weights and factors apart are the policy together."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from trl.models.lora_factors import base_stamp, base_weights, low_rank_factors, why_not_low_rank
from trl.models.weights import full_weights

LAYERS = ["q_proj", "down_proj"]


def adapted(**options):
    torch.manual_seed(1)
    settings = {"target_modules": LAYERS, "init_lora_weights": False, "r": 4}
    return get_peft_model(tiny_model(), LoraConfig(**(settings | options)))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "lora_alpha": 5}, {"rank_pattern": {"q_proj": 2}}],
    ids=["lora", "rslora", "ranks"],
)
def test_factors_on_base_weights_are_the_merged_weights(options):
    model = adapted(**options)
    assert why_not_low_rank(model) is None
    found = {name: weight.clone() for name, weight in base_weights(model)}
    plain = tiny_model().state_dict()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    pairs = list(low_rank_factors(model))
    assert len(pairs) == 4
    for pair in pairs:
        found[f"{pair.layer}.weight"] += pair.second @ pair.first
    for name, weight in full_weights(model):
        assert torch.allclose(found[name], weight, atol=1e-6)


def test_reading_base_weights_leaves_the_adapter_on():
    model, ids = adapted(), torch.arange(5, 15)[None]
    before = model(ids).logits
    trained = [p for p in model.parameters() if p.requires_grad]
    next(base_weights(model))
    list(base_weights(model))
    assert torch.equal(model(ids).logits, before)
    assert all(p.requires_grad for p in trained)


def test_the_stamp_of_the_base_changes_with_base_weights_alone():
    model = adapted()
    model.add_adapter("ref", LoraConfig(target_modules=LAYERS))
    before = base_stamp(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1)
        assert base_stamp(model) == before
        model.get_input_embeddings().weight.add_(1)
        assert base_stamp(model) > before
        between = base_stamp(model)
        model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight.add_(1)
        assert base_stamp(model) > between
