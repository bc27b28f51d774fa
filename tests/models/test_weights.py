"""One stream of whole weights, merged with the adapter, that never changes the policy."""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import tiny_model
from torch import nn

from trl.models.unwrap import policy_for_inference
from trl.models.weights import full_weights

IDS = torch.arange(5, 25)[None]
ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": ["k_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 8]},
}


def with_adapter(dtype=torch.float32, **options):
    """A model whose adapter and copies differ from what they were made of."""
    torch.manual_seed(3)
    model = get_peft_model(tiny_model().to(dtype), LoraConfig(init_lora_weights=False, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    return list(first) == list(second) and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["plain", "wrapped"])
def test_a_model_without_adapter_gives_its_state(wrap):
    model = tiny_model()
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("fleeting", torch.ones(2), persistent=False)
    found = dict(full_weights(wrap(model)))
    assert "kept" in found
    assert {n: v.data_ptr() for n, v in found.items()} == {
        n: v.data_ptr() for n, v in model.state_dict().items()
    }


def test_tied_weights_come_once():
    model = tiny_model(tie_word_embeddings=True)
    assert set(model.state_dict()) - set(dict(full_weights(model))) == {"lm_head.weight"}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_plain_model_with_the_stream_computes_the_same(kind):
    model = with_adapter(**ADAPTERS[kind])
    before = state(model)
    found = {name: value.clone() for name, value in full_weights(model)}
    assert same(state(model), before)
    plain = tiny_model(seed=1)
    assert set(found) == set(plain.state_dict())
    plain.load_state_dict(found)
    with torch.no_grad():
        wanted = model(IDS).logits
        assert torch.allclose(plain(IDS).logits, wanted, atol=1e-5)
        with model.disable_adapter():
            assert not torch.allclose(model(IDS).logits, wanted, atol=1e-3)
            found = {name: value.clone() for name, value in full_weights(model)}
    assert same(found, tiny_model().state_dict())  # what the adapter was put on


def test_expert_parameters_are_merged():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**shape, **heads))
    names = set(model.state_dict())
    experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = LoraConfig(
        target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False
    )
    adapted = get_peft_model(model, config)
    found = {name: value.clone() for name, value in full_weights(adapted)}
    assert set(found) == names
    wanted = adapted.merge_and_unload().state_dict()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in names)


def test_a_hundred_merges_in_half_precision_change_nothing():
    model = with_adapter(torch.bfloat16, target_modules=["q_proj", "down_proj"])
    before, first = state(model), None
    for _ in range(100):
        found = {name: value.clone() for name, value in full_weights(model)}
        first = first or found
    assert same(found, first)
    assert same(state(model), before)


@pytest.mark.parametrize("count", [1, 5])
def test_whoever_stops_early_leaves_the_policy_as_it_was(count):
    model = with_adapter(target_modules=["q_proj", "down_proj"])
    before, parameters = state(model), list(model.parameters())
    stream = full_weights(model)
    for _ in range(count):
        next(stream)
    with pytest.raises(KeyError):
        stream.throw(KeyError())
    assert same(state(model), before)
    pairs = zip(parameters, model.parameters(), strict=True)
    assert all(one is other for one, other in pairs)
    assert not any(getattr(m, "merged_adapters", []) for m in model.modules())


def test_the_reference_adapter_is_left_out():
    model = with_adapter(target_modules=["q_proj"])
    wanted = dict(full_weights(model))
    model.add_adapter("ref", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert same(dict(full_weights(model)), wanted)


def test_a_quantized_base_is_refused():
    model = tiny_model()
    model.is_quantized = True
    with pytest.raises(ValueError, match="quantized.*Load it without"):
        full_weights(model)


def test_prompt_tuning_is_refused():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PROMPT_TUNING adds tokens"):
        full_weights(get_peft_model(tiny_model(), config))


def test_weights_may_be_streamed_while_generating():
    model = tiny_model()
    with policy_for_inference(model, Accelerator(cpu=True)):
        assert len(list(full_weights(model))) == len(model.state_dict())
