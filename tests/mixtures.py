"""Tiny mixtures of experts."""

import torch
from tiny import SIZES
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS = 4


def mixture(kind, coefficient=0.5):
    settings = SIZES | {"num_experts_per_tok": 2, "router_aux_loss_coef": coefficient}
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=EXPERTS, **settings))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=16, **settings)
    )
