"""One stream of whole weights, merged with the adapter, that never changes the policy."""

import weakref

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from tiny import save_tiny, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl.models.unwrap import policy_for_inference
from trl.models.weights import (
    full_weights,
    is_quantized,
    keep_trainable,
    working_precision,
)

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


def in_4_bits(folder, **options):
    """A model whose layers bitsandbytes holds in 4 bits, and its own function to read them."""
    functional = pytest.importorskip("bitsandbytes").functional
    tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    torch.manual_seed(3)
    settings = {"target_modules": ["q_proj"], "init_lora_weights": False} | options
    model = get_peft_model(base, LoraConfig(**settings))
    return model, lambda layer: functional.dequantize_4bit(layer.weight, layer.weight.quant_state)


def test_a_hundred_times_4_bits_with_their_adapter(tmp_path):
    model, dense = in_4_bits(tmp_path)
    before, first = state(model), dict(full_weights(model))
    for _ in range(99):
        assert same(dict(full_weights(model)), first)
    assert same(state(model), before)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert {n: v.shape for n, v in first.items()} == {n: v.shape for n, v in plain.items()}
    layer = model.base_model.model.model.layers[0]
    q = layer.self_attn.q_proj
    change = q.lora_B["default"].weight @ q.lora_A["default"].weight * q.scaling["default"]
    found = first["model.layers.0.self_attn.q_proj.weight"]
    assert torch.allclose(found, dense(q.base_layer) + change, atol=1e-7)
    assert torch.equal(first["model.layers.0.mlp.up_proj.weight"], dense(layer.mlp.up_proj))


def test_one_layer_of_4_bits_is_held_in_full_at_a_time(tmp_path):
    model, _ = in_4_bits(tmp_path, target_modules=["q_proj", "down_proj"])
    seen = weakref.WeakSet()
    for name, weight in full_weights(model):
        if name.endswith("_proj.weight"):
            seen.add(weight)
        del weight
        assert len(seen) <= 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"is_loaded_in_8bit": True}, r"in 8 bits, which round the inputs .*\(--load_in_4bit\)"),
        ({}, "The base model is quantized, so it cannot .* without quantization"),
    ],
)
def test_other_quantized_bases_are_refused(flags, words):
    model = tiny_model()
    for name, value in ({"is_quantized": True} | flags).items():
        setattr(model, name, value)
    with pytest.raises(ValueError, match=words):
        full_weights(model)


def test_other_adapters_on_4_bits_are_refused(tmp_path):
    base = in_4_bits(tmp_path)[0].unload()
    model = get_peft_model(base, IA3Config(target_modules=["v_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="type IA3 cannot be merged into quantized weights"):
        full_weights(model)


def test_prompt_tuning_is_refused():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PROMPT_TUNING adds tokens"):
        full_weights(get_peft_model(tiny_model(), config))


def test_weights_may_be_streamed_while_generating():
    model = tiny_model()
    with policy_for_inference(model, Accelerator(cpu=True)):
        assert len(list(full_weights(model))) == len(model.state_dict())


# --- Quantized base models ---


bitsandbytes = pytest.importorskip("bitsandbytes")

TEN_IDS = torch.arange(10, 20)[None]
FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}


def load(folder, **options):
    save_tiny(folder, hidden_size=64, intermediate_size=128, head_dim=16)
    config = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def constants(model):
    weights = [m.weight for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    return [(w.data.clone(), w.quant_state.absmax.clone()) for w in weights]


def input_gradient(model):
    embedded = model.get_input_embeddings()(TEN_IDS).detach().requires_grad_()
    model.train()(inputs_embeds=embedded).logits.square().sum().backward()
    return embedded.grad


def test_evaluation_changes_nothing(tmp_path):
    model = load(tmp_path, **FOUR)
    keep_trainable(model)
    before, gradient = constants(model), input_gradient(model)
    with torch.no_grad():
        model.eval()(TEN_IDS)
    pairs = zip(constants(model), before, strict=True)
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
    assert torch.equal(input_gradient(model), gradient)


def test_weights_that_were_converted_are_refused(tmp_path):
    if not bitsandbytes.functional.has_avx512bf16():
        pytest.skip("bitsandbytes converts weights only on processors with AVX512-BF16")
    model = load(tmp_path, **FOUR)
    with torch.no_grad():
        model.eval()(TEN_IDS)
    with pytest.raises(ValueError, match="q_proj for inference, which rounds them"):
        keep_trainable(model)


def test_what_is_quantized(tmp_path):
    assert is_quantized(load(tmp_path, **FOUR))
    assert not is_quantized(tiny_model())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (FOUR, torch.float32),
        (FOUR | {"bnb_4bit_compute_dtype": "bfloat16"}, torch.bfloat16),
        ({"load_in_8bit": True}, torch.float16),
    ],
    ids=["4-bit", "4-bit in bf16", "8-bit"],
)
def test_precision_of_products(tmp_path, options, expected):
    assert working_precision(load(tmp_path, **options)) == expected


def test_precision_of_a_model_that_is_not_quantized():
    assert working_precision(tiny_model().to(torch.bfloat16)) == torch.bfloat16
