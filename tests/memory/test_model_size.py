import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from transformers import (
    Adafactor,
    Gemma2Config,
    GPT2Config,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)
from transformers.training_args import OptimizerNames

from trl.memory.model_size import (
    KNOWN_OPTIMIZERS,
    model_size,
    shares_prompts,
    state_bytes,
)


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
    assert (size.head, size.tied) == (model.lm_head.weight.numel(), tied)
    assert (size.adapter, size.frozen, size.adapted) == (0, False, frozenset())
    assert size.factored == sum(
        sum(p.shape) if p.dim() == 2 else p.numel() for p in model.parameters()
    )


def test_widths():
    config = tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=6).config
    size = model_size(config)
    assert (size.queries, size.keys) == (24, 12)
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


@pytest.mark.parametrize(
    ("config", "attention", "longest", "shares"),
    [
        (Qwen3Config(), None, 10**6, True),
        (Qwen3Config(), "sdpa", 10**6, True),
        (Gemma2Config(attn_logit_softcapping=50.0), None, 10, True),
        (MistralConfig(sliding_window=64), None, 65, True),
        (Qwen3Config(), "flex_attention", 10, False),
        (Qwen3Config(), "absent", 10, False),
    ],
)
def test_models_that_share_prompts(config, attention, longest, shares):
    assert shares_prompts(config, attention, longest) is shares


# --- States of real optimizers after a step ---


def held(optimizer):
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t) and t.dim())


def stepped(name, arguments, dtype):
    model = tiny_model("llama").to(dtype)
    options = TrainingArguments("unused", optim=name, optim_args=arguments, use_cpu=True)
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(options)
    optimizer = kind(model.parameters(), **kwargs)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, model_size(model.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("adamw_torch", None), ("adamw_torch_fused", None), ("sgd", None)),
        *(("sgd", "momentum=0.9"), ("sgd", "momentum=0"), ("rmsprop", None), ("adagrad", None)),
    ],
)
def test_states_of_torch(name, arguments, dtype):
    optimizer, size = stepped(name, arguments, dtype)
    assert state_bytes(name, arguments, size, dtype.itemsize) == held(optimizer)


def test_adafactor_keeps_rows_and_columns():
    optimizer, size = stepped("adafactor", None, torch.float32)
    assert isinstance(optimizer, Adafactor)
    assert state_bytes("adafactor", None, size, 4) == held(optimizer)


def test_eight_bits_take_a_byte_for_each_state():
    size = model_size(tiny_model("llama").config)
    for weight_bytes in (2, 4):
        assert state_bytes("adamw_bnb_8bit", None, size, weight_bytes) == 2 * size.trainable
        assert state_bytes("lion_8bit", None, size, weight_bytes) == size.trainable


def test_names_are_those_of_transformers():
    assert set(KNOWN_OPTIMIZERS) <= {name.value for name in OptimizerNames}


def test_an_unknown_optimizer_is_taken_to_be_like_adam():
    size = model_size(tiny_model("llama").config)
    assert "lomo" not in KNOWN_OPTIMIZERS
    assert state_bytes("lomo", None, size, 2) == 8 * size.trainable
