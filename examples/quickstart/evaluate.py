"""Measure how often a model answers held-out prompts correctly, with sampled and greedy answers."""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

SAMPLES = 8  # completions sampled for each held-out prompt


class Reward(Protocol):
    """A reward function of completions and answers."""

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]: ...


def load(model_folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer for generation."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval(), tokenizer


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    **options: Any,
) -> list[str]:
    """Return the model's completions of the prompts; `options` are those of `generate`."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        output = model.generate(**inputs, **options)
    return tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )


def completions(model_folder: Path, prompts: list[str], tokens: int) -> list[str]:
    """Return the greedy completion of each prompt."""
    return complete(*load(model_folder), prompts, do_sample=False, max_new_tokens=tokens)


def accuracies(
    model_folder: Path, test_file: Path, reward: Reward, tokens: int
) -> dict[str, float]:
    """Return the mean reward on held-out rows: `sampled` at temperature 1, and `greedy`."""
    model, tokenizer = load(model_folder)
    rows = [json.loads(line) for line in test_file.read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    torch.manual_seed(0)
    decoding_options = {
        "sampled": {"do_sample": True, "num_return_sequences": SAMPLES, "top_k": 0},
        "greedy": {"do_sample": False, "num_return_sequences": 1},
    }
    mean_rewards = {}
    for name, options in decoding_options.items():
        texts = complete(model, tokenizer, prompts, **options, max_new_tokens=tokens)
        answers = [row["answer"] for row in rows for _ in range(options["num_return_sequences"])]
        rewards = reward(completions=texts, answer=answers)
        mean_rewards[name] = sum(rewards) / len(rewards)
    return mean_rewards
