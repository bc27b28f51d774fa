"""What a vLLM server says of itself, and whether a policy can be trained with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

PROTOCOL = 3  # of trainer and workers; changes when they would not understand each other
PROBLEM = "Weights: "  # how what is wrong with the weights of a sync begins
SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)


@dataclass(frozen=True)
class ServerFacts:
    """What a server is, as one of its workers tells."""

    protocol: int  # `PROTOCOL` of its side
    vllm: str  # version
    shape: dict[str, Any]  # sizes of the model, by their names in its configuration
    dtype: str  # in which it computes
    context: int  # most tokens of a prompt with its completion
    logprobs_mode: str  # of which distribution log-probabilities are
    workers: int  # processes that take weights
    gpu: str | None  # of the worker; None: it is on a CPU


def shape_of(config: Any) -> dict[str, Any]:
    """What models must share for one to take the weights of the other."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in SHAPE}


def gpu_id(device: torch.device) -> str | None:
    """What tells a GPU from all others; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def refusals(server: ServerFacts, wanted: ServerFacts) -> Iterator[str]:
    """Why a policy cannot be trained with a server, in whole sentences; nothing if it can.

    `wanted` are facts of the policy and its process; of the context the least that will do.
    """
    if server.protocol != wanted.protocol:
        yield "It runs another version of trl: install the same one on both sides."
    if server.vllm.split(".")[:2] != wanted.vllm.split(".")[:2]:
        yield (
            f"It runs vLLM {server.vllm} and the trainer {wanted.vllm}: install the same release "
            "on both sides."
        )
    for name, size in wanted.shape.items():
        if server.shape.get(name) != size:
            yield (
                f"Its model has {name}={server.shape.get(name)} and the policy {size}: start it "
                "with the model that is trained (--model)."
            )
            break
    if server.dtype != wanted.dtype:
        yield (
            f"It computes in {server.dtype} and the policy in {wanted.dtype}: start it with "
            f"--dtype {wanted.dtype}."
        )
    if server.logprobs_mode != wanted.logprobs_mode:
        yield (
            f"Its log-probabilities are {server.logprobs_mode}: start it with --logprobs-mode "
            f"{wanted.logprobs_mode}."
        )
    if server.context < wanted.context:
        yield (
            f"It sees {server.context} tokens, but max_completion_length={wanted.context - 1} "
            "leaves no room for a prompt: start it with a larger --max_model_len."
        )
    if server.gpu is not None and server.gpu == wanted.gpu:
        yield (
            "It runs on the GPU that trains: give it other devices (CUDA_VISIBLE_DEVICES), or use "
            "vllm_mode='colocate'."
        )
