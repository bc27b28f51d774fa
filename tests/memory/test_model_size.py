import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import save_tiny, tiny_model
from transformers import Gemma2Config, GPT2Config, Qwen3Config, Qwen3MoeConfig

from trl.memory.model_size import load_config, model_size, shares_prompts


def count(parameters):
    return sum({id(p): p.numel() for p in parameters}.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_counts_are_those_of_the_model(kind, tied):
    model = tiny_model(kind, tie_word_embeddings=tied)
    size = model_size(model.config)
    assert size.parameters == size.trainable == count(model.parameters())
    layers = model.model.layers
    assert size.layer_matrices == count(p for p in layers.parameters() if p.dim() == 2)
    assert size.largest_matrix == max(p.numel() for p in layers.parameters())
    assert (size.head, size.tied) == (model.lm_head.weight.numel(), tied)
    assert (size.adapter, size.frozen, size.adapted) == (0, False, frozenset())
    assert size.factored == sum(
        sum(p.shape) if p.dim() == 2 else p.numel() for p in model.parameters()
    )


def test_widths():
    config = tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=6).config
    size = model_size(config)
    assert (size.queries, size.keys, size.head_size) == (24, 12, 6)
    assert (size.hidden, size.intermediate) == (config.hidden_size, config.intermediate_size)
    assert (size.layers, size.vocabulary, size.context) == (
        config.num_hidden_layers,
        config.vocab_size,
        256,
    )
    assert size.gated
    assert size.norms_heads
    assert not model_size(tiny_model("llama").config).norms_heads


@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"], "all-linear"])
def test_an_adapter(targets):
    options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": targets}
    config = LoraConfig(task_type="CAUSAL_LM", **options)
    base = tiny_model("llama")
    size = model_size(base.config, config)
    plain = count(base.parameters())
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    trained = count(p for p in model.parameters() if p.requires_grad)
    assert (size.parameters, size.trainable) == (count(model.parameters()), trained)
    assert size.adapter == size.parameters - plain == trained
    assert size.frozen
    assert size.dropout
    expected = {
        None: {"q_proj", "v_proj"},
        "all-linear": {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
    }
    assert size.adapted == (set(targets) if isinstance(targets, list) else expected[targets])


def test_other_architectures():
    old = model_size(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64))
    assert (old.hidden, old.intermediate, old.keys, old.gated) == (32, 128, 32, False)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    assert model_size(Qwen3MoeConfig(**shape, **experts)).intermediate == 48


def test_nothing_is_allocated():
    huge = Qwen3Config(hidden_size=2**15, intermediate_size=2**17, num_hidden_layers=2)
    assert model_size(huge).parameters * 4 > 2**36  # 64 GiB


def test_building_draws_no_random_numbers():
    config = tiny_model("llama").config
    before = torch.get_rng_state()
    model_size(config)
    assert torch.equal(before, torch.get_rng_state())


def test_reading_a_configuration(tmp_path):
    path = save_tiny(tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.unlink()  # the weights are not needed
    assert load_config(path).model_type == "llama"
    with pytest.raises(OSError, match="--model_name_or_path .*absent: "):
        load_config(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("config", "attention", "longest", "shares"),
    [
        (Qwen3Config(), None, 10**6, True),
        (Qwen3Config(), "sdpa", 10**6, True),
        (Qwen3Config(), "eager", 10, False),
        (Gemma2Config(attn_logit_softcapping=50.0), None, 10, False),
        (Gemma2Config(attn_logit_softcapping=None, sliding_window=64), None, 64, True),
        (Gemma2Config(attn_logit_softcapping=None, sliding_window=64), None, 65, False),
    ],
)
def test_models_that_share_prompts(config, attention, longest, shares):
    assert shares_prompts(config, attention, longest) is shares
