"""Random models, a tokenizer and prompts of exact lengths; nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# hidden, intermediate, layers, heads, key-value heads, head width, tied head
SHAPES = {
    "tiny": (8, 32, 2, 4, 2, 128, False),
    "small": (256, 768, 4, 4, 2, 64, True),
    "57m": (576, 1536, 8, 9, 3, 64, True),
    "135m": (576, 1536, 30, 9, 3, 64, True),
    "0.5b": (896, 4864, 24, 14, 2, 64, True),
    "1.5b": (1536, 8960, 28, 12, 2, 128, True),
}
# Kinds of layers: a class, and sizes beside those that all of them have.
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4, "n_group": 1}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 64, "first_k_dense_replace": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 16, "num_experts": 0}
KINDS = {
    "gemma3": ("Gemma3Text", "Gemma3", GROUPED | ALTERNATING | {"sliding_window": 512}),
    "gpt-oss": ("GptOss", "GptOss", GROUPED | EXPERTS | {"sliding_window": 128}),
    "deepseek-v3": ("DeepseekV3", "DeepseekV3", LATENT),
    "qwen3-next": ("Qwen3Next", "Qwen3Next", GROUPED | DELTA),
}


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each word w0, w1, ..., and an end token the model lacks.

    So no completion ends before its length limit, whatever is sampled.
    """
    token_ids = {f"w{i}": i for i in range(vocabulary + 1)}
    core = Tokenizer(models.WordLevel(token_ids, unk_token="w1"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="w0",
        eos_token=f"w{vocabulary}",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def make_kind(kind: str, vocabulary: int, positions: int) -> transformers.PreTrainedModel:
    """Make a random model of four layers in float32, of one of `KINDS`."""
    config, model, sizes = KINDS[kind]
    common = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    common |= {"num_attention_heads": 4, "max_position_embeddings": positions, "pad_token_id": 0}
    common |= {"vocab_size": vocabulary, "eos_token_id": vocabulary, "bos_token_id": None}
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{config}Config")
    return getattr(transformers, f"{model}ForCausalLM")(config_class(**common | sizes))


def make_model(
    shape: str, vocabulary: int, positions: int, seed: int = 0
) -> transformers.PreTrainedModel:
    """Make a random Qwen3 in float32, or a model of one of `KINDS`."""
    if shape in KINDS:
        return make_kind(shape, vocabulary, positions)
    hidden, intermediate, layers, heads, groups, width, tied = SHAPES[shape]
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=vocabulary,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def save(folder: Path, shape: str, vocabulary: int, positions: int) -> Path:
    """Write model and tokenizer as a checkpoint, unless it exists."""
    marker = folder / ".complete"
    if not marker.exists():
        make_model(shape, vocabulary, positions).save_pretrained(folder)
        make_tokenizer(vocabulary).save_pretrained(folder)
        marker.touch()
    return folder


def prompts(count: int, length: int, vocabulary: int, ragged: bool = False) -> list[str]:
    """Make different prompts of exactly `length` tokens, or of at least half of them."""
    draw = random.Random(0)
    lengths = [draw.randint(length // 2, length) if ragged else length for _ in range(count)]
    return [" ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(n)) for n in lengths]
