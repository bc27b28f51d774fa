"""Tiny mixtures of experts."""

import torch
from tiny import tiny_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS = 4


def mixture(kind, coefficient=0.5):
    settings = {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": coefficient,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=EXPERTS, **settings))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=16, **settings)
    )
