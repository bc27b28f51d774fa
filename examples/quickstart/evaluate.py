"""How often a model answers held-out prompts rightly, sampled and greedy."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES = 8  # drawn for each held-out prompt


def load(model_folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer, to generate with."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval(), tokenizer


def complete(model: Any, tokenizer: Any, prompts: list[str], **options: Any) -> list[str]:
    """What the model writes behind each prompt."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        output = model.generate(**inputs, **options)
    return tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )


def completions(model_folder: Path, prompts: list[str], tokens: int) -> list[str]:
    """The likeliest continuation of each prompt."""
    return complete(*load(model_folder), prompts, do_sample=False, max_new_tokens=tokens)


def accuracies(model_folder: Path, test_file: Path, reward: Any, tokens: int) -> dict[str, float]:
    """Mean reward on the held-out rows: `sampled` at temperature 1, and `greedy`."""
    model, tokenizer = load(model_folder)
    rows = [json.loads(line) for line in test_file.read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    torch.manual_seed(0)
    found = {}
    for name, options in {
        "sampled": {"do_sample": True, "num_return_sequences": SAMPLES, "top_k": 0},
        "greedy": {"do_sample": False, "num_return_sequences": 1},
    }.items():
        texts = complete(model, tokenizer, prompts, **options, max_new_tokens=tokens)
        answers = [row["answer"] for row in rows for _ in range(options["num_return_sequences"])]
        rewards = reward(completions=texts, answer=answers)
        found[name] = sum(rewards) / len(rewards)
    return found
