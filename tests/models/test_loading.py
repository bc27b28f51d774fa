"""Policies, tokenizers and adapters: loaded, trained, saved and resumed."""

import shutil
import warnings

import peft
import pytest
import torch
from online_runs import dataset, make_trainer
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
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
    adapter_base,
    add_adapter,
    context_length,
    disable_dropout_in_model,
    load_adapter,
    load_config,
    load_policy,
    load_tokenizer,
    settle_pad_token,
    stop_token_ids,
    trainable,
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
    assert load_policy(name, {"torch_dtype": dtype}).dtype == expected, "as it was called"


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
    with pytest.raises(OSError, match="absent': there is no such folder."):
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
    with pytest.warns(UserWarning, match="device_map is ignored"):
        loaded = load_policy(save_tiny(tmp_path), options, distributed=True)
    assert getattr(loaded, "hf_device_map", None) is None
    assert loaded.device == torch.device("cpu")
    assert options == {"device_map": "auto"}


def test_quantization_given_twice_is_an_error(tmp_path):
    given = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="as an argument or in model_init_kwargs, not both"):
        load_policy(str(tmp_path), {"quantization_config": given}, quantization_config=given)


def test_a_missing_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = str(tmp_path / "nowhere")
    with pytest.raises(OSError, match=f"The model '{name}': there is no such folder"):
        load_policy(name, None)


def test_tokenizers_pad_on_the_left(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    padded = loaded(["a", "abc"], padding=True)["input_ids"]
    (a, b, c), pad = tokenizer("abc")["input_ids"], tokenizer.pad_token_id
    assert padded == [[pad, pad, a], [a, b, c]]


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer: tokenizer.json is missing."):
        load_tokenizer(str(tmp_path))


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


# --- Adapters ---

TARGETS = ["q_proj", "v_proj"]


def lora(**changes):
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": TARGETS} | changes
    )


def test_only_the_adapter_is_trainable():
    """Two layers, two modules in each, two factors of 4 x 32 or 4 x (heads * 8)."""
    model = add_adapter(tiny_model(), lora())
    trainable = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trainable)
    assert len(trainable) == 8
    assert sum(trainable.values()) == 2 * (4 * (32 + 32) + 4 * (32 + 16))


def test_adapters_come_without_warnings_that_users_can_do_nothing_about(tmp_path):
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        add_adapter(tiny_model(), lora()).save_pretrained(tmp_path)
        load_adapter(tiny_model(), str(tmp_path))
    assert not [x for x in heard if "is_gradient_checkpointing" in str(x.message)]
    assert warnings.filters == before


def test_what_is_no_config_is_refused():
    with pytest.raises(TypeError, match=r"peft_config must be a peft\.PeftConfig, not dict"):
        add_adapter(tiny_model(), {"r": 4})


def test_a_second_adapter_is_refused():
    model = peft.get_peft_model(tiny_model(), lora())
    with pytest.raises(ValueError, match="already has an adapter"):
        add_adapter(model, lora())


def test_a_frozen_adapter_is_refused():
    model = peft.get_peft_model(tiny_model(), lora(inference_mode=True))
    with pytest.raises(ValueError, match="loaded for inference. .* is_trainable=True"):
        trainable(model)


def test_a_stored_adapter_is_found_with_its_model(tmp_path):
    base = save_tiny(tmp_path / "base")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    model.save_pretrained(tmp_path / "adapter")
    name = str(tmp_path / "adapter")
    assert adapter_base(name) == (base, None)
    assert adapter_base(base) is None
    with pytest.raises(OSError, match=r"has no config.json. Did you mean .*adapter\?"):
        adapter_base(str(tmp_path))
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


@pytest.mark.parametrize("recomputing", [{}, {"use_reentrant": True}])
def test_training_moves_the_adapter_alone(tmp_path, recomputing):
    """Also where recomputed layers get no gradient unless their inputs require one."""
    options = {"gradient_checkpointing_kwargs": recomputing, "gradient_checkpointing": True}
    trainer = trainer_of(tmp_path, **(options if recomputing else {}))
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
