"""How often a model answers held-out prompts rightly, sampled and greedy."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES = 8  # drawn for each held-out prompt


def accuracies(model_folder: Path, test_file: Path, reward: Any, tokens: int) -> dict[str, float]:
    """Mean reward on the held-out rows: `sampled` at temperature 1, and `greedy`."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in test_file.read_text().splitlines()]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    torch.manual_seed(0)
    found = {}
    for name, options in {
        "sampled": {"do_sample": True, "num_return_sequences": SAMPLES, "top_k": 0},
        "greedy": {"do_sample": False, "num_return_sequences": 1},
    }.items():
        count = options["num_return_sequences"]
        with torch.no_grad():
            output = model.generate(**inputs, **options, max_new_tokens=tokens)
        texts = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        answers = [row["answer"] for row in rows for _ in range(count)]
        rewards = reward(completions=texts, answer=answers)
        found[name] = sum(rewards) / len(rewards)
    return found
