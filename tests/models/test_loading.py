import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM

from trl.models.loading import (
    context_length,
    disable_dropout_in_model,
    load_policy,
    load_tokenizer,
    resolve_dtype,
    settle_pad_token,
    stop_token_ids,
)


def test_float32_unless_told_otherwise(tmp_path):
    name = save_tiny(tmp_path / "m")
    assert load_policy(name, None).dtype == torch.float32
    options = {"dtype": "bfloat16"}
    found = load_policy(name, options)
    assert isinstance(found, LlamaForCausalLM)
    assert found.dtype == torch.bfloat16
    assert options == {"dtype": "bfloat16"}, "not modified"


@pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), ("float16", torch.float16)])
def test_dtypes(given, expected):
    assert resolve_dtype(given) == expected


def test_errors_are_about_the_model(tmp_path):
    with pytest.raises(ValueError, match="'float8' .* auto, bfloat16, float16, float32"):
        load_policy(save_tiny(tmp_path / "m"), {"dtype": "float8"})
    with pytest.raises(OSError, match=r"'.*nowhere' is neither a folder with a config.json nor"):
        load_policy(str(tmp_path / "nowhere"), None)
    with pytest.raises(ValueError, match="both as an argument and in model_init_kwargs"):
        load_policy("m", {"quantization_config": 1}, quantization_config=2)


def test_tokenizers_pad_on_the_left(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).padding_side == "left"


def test_pad_token_is_settled_everywhere():
    model, tokenizer = tiny_model(pad_token_id=None), tiny_tokenizer()
    tokenizer.pad_token = None
    assert settle_pad_token(model, tokenizer) == tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == 1
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad token nor an EOS token"):
        settle_pad_token(model, tokenizer)


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, (1,)), (5, (1, 5)), ([32, 7, 32], (1, 7, 32)), ([1, 106], (1, 106))],
)
def test_every_stop_token_counts(configured, expected):
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=configured)
    assert stop_token_ids(model, tiny_tokenizer()) == expected


def test_dropout_is_switched_off_everywhere():
    model = tiny_model(attention_dropout=0.5)
    model.extra = nn.Dropout(0.3)
    disable_dropout_in_model(model)
    model.train()
    ids = torch.tensor([[8, 9, 10]])
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.extra.p == 0.0


def test_context_length():
    assert context_length(tiny_model(max_position_embeddings=77)) == 77
