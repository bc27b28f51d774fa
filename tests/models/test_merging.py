"""Merged models compute what base model and adapter computed, for every kind of adapter."""

import json

import peft
import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trl.models.merging import check_output, merge_adapter, write_merged
from trl.models.stored_adapter import read_adapter

IDS = torch.arange(5, 45).view(2, 20)
BOUND = 5e-6  # largest difference of logits in float32, relative to the largest of them
LAYERS = ["q_proj", "v_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "all-linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [7, 8]},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}
TIED = ["lora", "head", "embedding", "whole modules", "tokens"]


def causal_base(folder, **changes):
    save_tiny(folder, initializer_range=0.2, **changes)
    return AutoModelForCausalLM.from_pretrained(folder)


def lora(**options):
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": LAYERS, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(defaults | options))


def store(base, config, folder):
    """Put a random adapter on a model, store it, and return the logits of both together."""
    torch.manual_seed(1)
    policy = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
        logits = policy(IDS).logits
        unchanged = policy.get_base_model()
        with policy.disable_adapter():
            assert (unchanged(IDS).logits - logits).abs().max() > 0.01
    policy.save_pretrained(folder)
    return logits


def distance(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def merged_logits(folder, kind=AutoModelForCausalLM, **options):
    """Merge, write, load again and compute."""
    adapter = read_adapter(str(folder / "adapter"))
    merged = merge_adapter(adapter, **options)
    write_merged(merged, adapter, folder / "merged")
    model, report = kind.from_pretrained(folder / "merged", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("name", LORA)
def test_logits_of_every_kind_of_lora(tmp_path, name):
    expected = store(causal_base(tmp_path / "base"), lora(**LORA[name]), tmp_path / "adapter")
    assert distance(merged_logits(tmp_path), expected) <= BOUND


@pytest.mark.filterwarnings("ignore:.*tie")
@pytest.mark.parametrize("ensures", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_logits_with_tied_weights(tmp_path, name, ensures):
    """An adapter of the head alone or the embedding alone unties them; others leave them tied."""
    config = lora(**LORA[name], ensure_weight_tying=ensures)
    expected = store(
        causal_base(tmp_path / "base", tie_word_embeddings=True), config, tmp_path / "adapter"
    )
    assert distance(merged_logits(tmp_path), expected) <= BOUND
    settings = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert settings["tie_word_embeddings"] == (name in ("lora", "tokens") or ensures)


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        ),
        peft.LoHaConfig(r=4, target_modules=LAYERS, task_type="CAUSAL_LM"),
        peft.OFTConfig(r=8, oft_block_size=0, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_logits_of_other_adapters(tmp_path, config):
    expected = store(causal_base(tmp_path / "base"), config, tmp_path / "adapter")
    assert distance(merged_logits(tmp_path), expected) <= BOUND


def test_logits_of_experts(tmp_path):
    torch.manual_seed(0)
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**(tiny_model().config.to_dict() | settings))
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = store(base, lora(target_parameters=EXPERTS), tmp_path / "adapter")
    assert distance(merged_logits(tmp_path), expected) <= BOUND


def test_logits_of_a_classifier(tmp_path):
    """Its score layer is new, and stored with the adapter alone."""
    save_tiny(tmp_path / "base")
    torch.manual_seed(2)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    expected = store(base, lora(task_type="SEQ_CLS"), tmp_path / "adapter")
    found = merged_logits(tmp_path, AutoModelForSequenceClassification)
    assert found.shape == (2, 3)
    assert distance(found, expected) <= BOUND


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["lora", "whole modules"])
def test_logits_with_a_grown_vocabulary(tmp_path, name, tied):
    base = causal_base(tmp_path / "base", tie_word_embeddings=tied)
    base.resize_token_embeddings(base.config.vocab_size + 8)
    expected = store(base, lora(**LORA[name]), tmp_path / "adapter")
    assert distance(merged_logits(tmp_path), expected) <= BOUND


FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (FOUR, BOUND),
        (FOUR | {"bnb_4bit_use_double_quant": True}, BOUND),
        ({"load_in_8bit": True}, 0.1),
    ],
    ids=["4 bits", "4 bits, nested", "8 bits"],
)
@pytest.mark.parametrize("stored", [False, True], ids=["quantized in the run", "stored so"])
def test_logits_on_quantized_weights(tmp_path, settings, bound, stored):
    """In 8 bits layers round their inputs too, which a merged model does not."""
    causal_base(tmp_path / "base", hidden_size=64, intermediate_size=128, head_dim=16)
    quantization = BitsAndBytesConfig(**settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=quantization)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if stored:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
        base.save_pretrained(tmp_path / "quantized")
        tokenizer.save_pretrained(tmp_path / "quantized")
        base.name_or_path = str(tmp_path / "quantized")
    expected = store(base, lora(), tmp_path / "adapter")
    record = {"quantization": quantization.to_dict()}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert distance(merged_logits(tmp_path), expected) <= bound
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


@pytest.mark.filterwarnings("ignore:.*tie")
def test_a_head_that_was_not_stored_is_missed(tmp_path):
    """peft stores the grown matrix of the embedding alone if that has an adapter."""
    base = causal_base(tmp_path / "base", tie_word_embeddings=True)
    base.resize_token_embeddings(base.config.vocab_size + 8)
    expected = store(base, lora(**LORA["embedding"]), tmp_path / "adapter")
    assert distance(merged_logits(tmp_path), expected) <= BOUND
    base = causal_base(tmp_path / "base")
    base.resize_token_embeddings(base.config.vocab_size + 8)
    store(base, lora(**LORA["embedding"]), tmp_path / "adapter")
    with pytest.raises(ValueError, match="an embedding of 103 tokens where the base model has 95"):
        merged_logits(tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_half_precision_is_rounded_once(tmp_path, dora):
    """Layers are merged in float32, then rounded to what the base model is stored in."""
    model = tiny_model(initializer_range=0.2).bfloat16()
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    store(base, lora(use_dora=dora), tmp_path / "adapter")
    adapter = read_adapter(str(tmp_path / "adapter"))
    exact = merge_adapter(adapter, dtype="float32").model.state_dict()
    rounded = merge_adapter(adapter).model
    assert rounded.dtype == torch.bfloat16
    for name, weight in rounded.state_dict().items():
        assert torch.equal(weight, exact[name].bfloat16()), name


def test_full_precision_ignores_the_quantization_of_the_run(tmp_path):
    expected = store(causal_base(tmp_path / "base"), lora(), tmp_path / "adapter")
    record = {"quantization": BitsAndBytesConfig(**FOUR).to_dict()}
    (tmp_path / "run.json").write_text(json.dumps(record))
    adapter = read_adapter(str(tmp_path / "adapter"))
    rounded = merge_adapter(adapter)
    assert "--full_precision" in rounded.notices[0] and "4 bits" in rounded.notices[0]
    exact = merge_adapter(adapter, full_precision=True)
    assert exact.notices == []
    with torch.no_grad():
        assert distance(exact.model(IDS).logits, expected) <= BOUND
        assert distance(rounded.model(IDS).logits, expected) > 0.01


def test_what_comes_along(tmp_path):
    """The tokenizer of the adapter, its template and EOS token, and the generation settings."""
    base = causal_base(tmp_path / "base")
    base.generation_config.update(do_sample=True, temperature=0.7)
    base.generation_config.save_pretrained(tmp_path / "base")
    store(base, lora(), tmp_path / "adapter")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.eos_token = "<end>"
    tokenizer.save_pretrained(tmp_path / "adapter")
    merged_logits(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert loaded.chat_template == tokenizer.chat_template and loaded.eos_token == "<end>"
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generation_config
    assert generation.temperature == 0.7 and generation.pad_token_id == 0
    assert generation.eos_token_id == [tokenizer.eos_token_id, 1]


def test_the_tokenizer_of_the_base_model_or_none(tmp_path):
    store(causal_base(tmp_path / "base"), lora(), tmp_path / "adapter")
    merged_logits(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<eos>"
    for path in (tmp_path / "base").glob("*token*"):
        path.unlink()
    merged = merge_adapter(read_adapter(str(tmp_path / "adapter")))
    assert merged.tokenizer is None
    assert merged.notices == [
        "Neither the adapter nor its base model has a tokenizer: none is written."
    ]


def test_other_base_models_are_refused(tmp_path):
    """Of other sizes, without the layers of the adapter, or without weights that it lacks, too."""
    store(causal_base(tmp_path / "base"), lora(), tmp_path / "adapter")
    wide = save_tiny(tmp_path / "wide", hidden_size=64, head_dim=16)
    with pytest.raises(ValueError, match="does not fit the base model .*wide: size mismatch for"):
        merge_adapter(read_adapter(str(tmp_path / "adapter"), wide))
    deep = save_tiny(tmp_path / "deep", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"does not fit .*deep: missing: .*layers\.2\."):
        merge_adapter(read_adapter(str(tmp_path / "adapter"), deep))
    shallow = save_tiny(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"does not fit .*shallow: unexpected: .*layers\.1\."):
        merge_adapter(read_adapter(str(tmp_path / "adapter"), shallow))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config |= {"task_type": "SEQ_CLS"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="and neither has the adapter"):
        merge_adapter(read_adapter(str(tmp_path / "adapter")))


def test_a_start_that_cannot_be_repeated_is_refused(tmp_path):
    config = lora(init_lora_weights="pissa_niter_2")
    store(causal_base(tmp_path / "base"), config, tmp_path / "adapter")
    with pytest.raises(ValueError, match="'pissa_niter_2' moved a part of the base weights"):
        merge_adapter(read_adapter(str(tmp_path / "adapter")))


def test_an_adapter_with_nan_is_refused(tmp_path):
    base = causal_base(tmp_path / "base")
    policy = peft.get_peft_model(base, lora())
    torch.nn.init.constant_(
        policy.get_parameter(
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
        ),
        float("nan"),
    )
    policy.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter of type LORA cannot be merged: NaNs detected"):
        merge_adapter(read_adapter(str(tmp_path / "adapter")))


def test_where_a_merge_may_be_written(tmp_path):
    store(causal_base(tmp_path / "base"), lora(), tmp_path / "adapter")
    adapter = read_adapter(str(tmp_path / "adapter"))
    check_output(tmp_path / "new", adapter)
    (tmp_path / "merged").mkdir()
    check_output(tmp_path / "merged", adapter)
    for name in ("adapter", "base"):
        with pytest.raises(ValueError, match="is an input of the merge: choose another folder"):
            check_output(tmp_path / name, adapter)
    (tmp_path / "merged" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty, and not an earlier merge"):
        check_output(tmp_path / "merged", adapter)
    with pytest.raises(NotADirectoryError, match="is a file"):
        check_output(tmp_path / "merged" / "notes.txt", adapter)
    (tmp_path / "merged" / "notes.txt").unlink()
    write_merged(merge_adapter(adapter), adapter, tmp_path / "merged")
    check_output(tmp_path / "merged", adapter)
