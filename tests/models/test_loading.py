import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3ForCausalLM,
    XLNetConfig,
)

from trl.models.loading import (
    context_length,
    disable_dropout_in_model,
    load_config,
    load_policy,
    load_tokenizer,
    settle_pad_token,
    stop_token_ids,
)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float32", torch.float32),
        ("auto", torch.bfloat16),  # as it was saved
        (torch.float16, torch.float16),
    ],
)
def test_dtypes(tmp_path, dtype, expected):
    name = str(tmp_path / "model")
    tiny_model("qwen3").to(torch.bfloat16).save_pretrained(name)
    assert load_policy(name, {"dtype": dtype}).dtype == expected


def test_unknown_dtypes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype='float8' in model_init_kwargs"):
        load_policy(save_tiny(tmp_path), {"dtype": "float8"})
    with pytest.raises(ValueError, match=r"dtype='int8' .* must be one of auto, bfloat16"):
        load_policy("no-model", {"dtype": "int8"})


@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", LlamaForCausalLM), ("qwen3", Qwen3ForCausalLM)]
)
def test_the_saved_weights_in_the_saved_architecture(tmp_path, kind, expected):
    name = save_tiny(tmp_path, kind)
    loaded, saved = load_policy(name, None), tiny_model(kind)
    assert type(loaded) is expected
    states = loaded.state_dict()
    assert states.keys() == saved.state_dict().keys()
    assert all(torch.equal(states[n].cpu(), v) for n, v in saved.state_dict().items())


def test_reading_a_configuration(tmp_path):
    path = save_tiny(tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.unlink()  # the weights are not needed
    assert load_config(path).model_type == "llama"
    with pytest.raises(OSError, match="absent' is neither a folder with a config.json nor on the"):
        load_config(str(tmp_path / "absent"))


def test_float32_unless_said_otherwise(tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    options = {"dtype": "bfloat16"}
    assert load_policy(str(tmp_path), None).dtype == torch.float32
    assert load_policy(str(tmp_path), {}).dtype == torch.float32
    assert load_policy(str(tmp_path), options).dtype == torch.bfloat16
    assert load_policy(str(tmp_path), {"dtype": "auto"}).dtype == torch.bfloat16
    assert options == {"dtype": "bfloat16"}, "not modified"


def test_several_processes_place_the_model_themselves(tmp_path):
    options = {"device_map": "auto"}
    with pytest.warns(UserWarning, match="device_map is left out"):
        loaded = load_policy(save_tiny(tmp_path), options, distributed=True)
    assert getattr(loaded, "hf_device_map", None) is None
    assert loaded.device == torch.device("cpu")
    assert options == {"device_map": "auto"}


def test_quantization_given_twice_is_an_error(tmp_path):
    given = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="both as an argument and in model_init_kwargs"):
        load_policy(str(tmp_path), {"quantization_config": given}, quantization_config=given)


def test_a_missing_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = str(tmp_path / "nowhere")
    with pytest.raises(OSError, match=f"The model '{name}' is neither a folder .* nor on the hub"):
        load_policy(name, None)


def test_tokenizers_pad_on_the_left(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    padded = loaded(["a", "abc"], padding=True)["input_ids"]
    (a, b, c), pad = tokenizer("abc")["input_ids"], tokenizer.pad_token_id
    assert padded == [[pad, pad, a], [a, b, c]]


def test_the_pad_token_is_kept_or_the_end_token():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    assert settle_pad_token(model, tokenizer) == 0
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (0, 0)
    tokenizer.pad_token = None
    assert settle_pad_token(model, tokenizer) == 1
    assert tokenizer.pad_token == "<eos>"
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (1, 1)


def test_a_tokenizer_needs_a_pad_or_an_end_token():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config = None
    assert settle_pad_token(model, tokenizer) == 0
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad token nor an EOS token"):
        settle_pad_token(model, tokenizer)


@pytest.mark.parametrize(
    ("configured", "own", "expected"),
    [
        (None, "<eos>", (1,)),
        (6, "<eos>", (1, 6)),
        ([6, 1, 3, 6], "<eos>", (1, 3, 6)),
        ([6], None, (6,)),
        (None, None, ()),
    ],
)
def test_stop_tokens(configured, own, expected):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = configured
    tokenizer.eos_token = own
    assert stop_token_ids(model, tokenizer) == expected


def test_stop_tokens_without_generation_config():
    model = tiny_model()
    model.generation_config = None
    assert stop_token_ids(model, tiny_tokenizer()) == (1,)


def with_a_module():
    model = tiny_model(attention_dropout=0.5)
    model.model.norm = nn.Sequential(model.model.norm, nn.Dropout(0.5))
    return model


def with_numbers():
    sizes = {"ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"vocab_size": 95, "hidden_size": 32, "word_embed_proj_dim": 32}
    return OPTForCausalLM(OPTConfig(**sizes, dropout=0.5, attention_dropout=0.5))


@pytest.mark.parametrize("build", [with_a_module, with_numbers])
def test_dropout_ends(build):
    torch.manual_seed(0)
    model = build().train()
    ids = torch.tensor([[8, 9, 10, 11]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout_in_model(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(model(ids).logits, model.eval()(ids).logits)


def test_context_length():
    assert context_length(tiny_model(max_position_embeddings=99)) == 99
    model = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2))
    assert context_length(model) is None, "positions without limit"
    model.config = XLNetConfig()
    assert context_length(model) is None, "-1 stands for no limit"
