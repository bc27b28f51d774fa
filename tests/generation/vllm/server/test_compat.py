"""Which servers are refused, and in which words."""

import dataclasses
import re

import pytest
import torch
from tiny import tiny_model

from trl.generation.vllm.server.compat import PROTOCOL, ServerFacts, gpu_id, refusals, shape_of

WANTED = ServerFacts(
    protocol=PROTOCOL,
    vllm="0.32.0",
    shape={"model_type": "llama", "hidden_size": 64},
    dtype="float32",
    context=9,
    logprobs_mode="processed_logprobs",
    workers=1,
    gpu="GPU-1",
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vllm": "0.32.5"},
        {"context": 4096},
        {"workers": 8},
        {"gpu": "GPU-2"},
        {"gpu": None},
        {"shape": WANTED.shape | {"more": 1}},
    ],
)
def test_a_server_that_fits(changes):
    assert list(refusals(dataclasses.replace(WANTED, **({"gpu": "GPU-0"} | changes)), WANTED)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 0}, "another version of trl"),
        ({"vllm": "0.31.1"}, "runs vLLM 0.31.1 and the trainer 0.32.0"),
        ({"shape": {"model_type": "qwen3", "hidden_size": 64}}, "model_type=qwen3 .* llama"),
        ({"shape": {"model_type": "llama"}}, "hidden_size=None and the policy 64"),
        ({"dtype": "bfloat16"}, "in bfloat16 and the policy in float32: .* --dtype float32"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs: .* --logprobs-mode processed_logprobs"),
        ({"context": 8}, "sees 8 tokens, but max_completion_length=8 .*larger --max_model_len"),
        ({"gpu": "GPU-1"}, "on the GPU that trains"),
    ],
)
def test_a_server_that_does_not_fit(changes, words):
    server = dataclasses.replace(WANTED, **({"gpu": "GPU-0"} | changes))
    (reason,) = refusals(server, WANTED)
    assert re.search(words, reason), reason


def test_cpus_are_not_told_apart():
    cpu = dataclasses.replace(WANTED, gpu=gpu_id(torch.device("cpu")))
    assert cpu.gpu is None and list(refusals(cpu, cpu)) == []


def test_shapes_tell_models_apart():
    shapes = [
        shape_of(tiny_model(kind, **changes).config)
        for kind, changes in (
            ("llama", {}),
            ("qwen3", {}),
            ("llama", {"num_hidden_layers": 3}),
            ("llama", {"tie_word_embeddings": True}),
        )
    ]
    assert all(a != b for place, a in enumerate(shapes) for b in shapes[:place])
    assert shapes[0] == shape_of(tiny_model(seed=5).config)


def test_facts_travel_as_json():
    assert ServerFacts(**dataclasses.asdict(WANTED)) == WANTED
