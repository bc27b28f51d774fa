"""4-bit weights stay as they are when the model evaluates, and gradients go through them."""

import pytest
import torch
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl.models.quantized import is_quantized, keep_trainable, working_precision

bitsandbytes = pytest.importorskip("bitsandbytes")

IDS = torch.arange(10, 20)[None]
FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}


def load(folder, **options):
    save_tiny(folder, hidden_size=64, intermediate_size=128, head_dim=16)
    config = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def constants(model):
    weights = [m.weight for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    return [(w.data.clone(), w.quant_state.absmax.clone()) for w in weights]


def input_gradient(model):
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model.train()(inputs_embeds=embedded).logits.square().sum().backward()
    return embedded.grad


def test_evaluation_changes_nothing(tmp_path):
    model = load(tmp_path, **FOUR)
    keep_trainable(model)
    before, gradient = constants(model), input_gradient(model)
    with torch.no_grad():
        model.eval()(IDS)
    pairs = zip(constants(model), before, strict=True)
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
    assert torch.equal(input_gradient(model), gradient)


def test_weights_that_were_converted_are_refused(tmp_path):
    if not bitsandbytes.functional.has_avx512bf16():
        pytest.skip("bitsandbytes converts weights only on processors with AVX512-BF16")
    model = load(tmp_path, **FOUR)
    with torch.no_grad():
        model.eval()(IDS)
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
