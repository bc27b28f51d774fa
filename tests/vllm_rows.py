"""The rows that tests complete with a vLLM engine, and names of weights to tamper with."""

import torch
from backend_contract import model_logps

from trl.types import Prompts, Sampling

PROMPTS = Prompts(messages=["a"] * 4, token_ids=[[20 + n for n in range(40)]] * 4)
Q, K, DOWN = (
    f"model.layers.{place}.weight"
    for place in ("0.self_attn.q_proj", "1.self_attn.k_proj", "1.mlp.down_proj")
)


def sampling(**changes):
    return Sampling(**({"max_tokens": 12, "seeds": (1, 2, 3, 4)} | changes))


def gap(model, found, temperature=1.0):
    """Largest difference of a log-probability from the model's own."""
    return max(
        (torch.tensor(logps) - model_logps(model, PROMPTS.token_ids[0], ids, temperature))
        .abs()
        .max()
        .item()
        for ids, logps in zip(found.completion_ids, found.sampling_logps, strict=True)
    )
