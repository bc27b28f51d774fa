"""Measure the prefixes that completions of a prompt share: writes docs/benchmarks/siblings.md.

A token is in common with a sibling if all tokens before it are the same too: a tree of the
completions would compute it once. SmolLM2-135M-Instruct answers prompts of several kinds.
"""

from __future__ import annotations

import argparse
import platform
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean

import torch
from tables import markdown
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl.generation.base import Sampling, row_seeds
from trl.generation.transformers.backend import TransformersBackend
from trl.types import Prompts

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

PROMPTS = {
    "sum": "What is 27 + 15? Answer with the number only.",
    "short answer": "What is the capital of France?",
    "word problem": "A farmer has 12 cows and buys 7 more, then sells 5. How many are left? Think "
    "step by step.",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "essay": "Explain why the sky is blue to a child of ten.",
    "story": "Write the beginning of a story about a lighthouse.",
}
COUNTS = (8, 32)
TEMPERATURES = (1.0, 0.7)


def distinct(rows: list[list[int]]) -> int:
    """Count the nodes of the prefix tree of the rows: the tokens that must be computed."""
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def shares(backend: TransformersBackend, tokenizer, limit: int) -> dict[tuple, tuple[int, int]]:
    """Return (tokens, distinct tokens) of completions, by prompt, count and temperature."""
    shares_by_case = {}
    for kind, text in PROMPTS.items():
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for count in COUNTS:
            for temperature in TEMPERATURES:
                sampling = Sampling(
                    max_tokens=limit,
                    temperature=temperature,
                    stop_ids=(tokenizer.eos_token_id,),
                    seeds=row_seeds((kind, temperature), 0, count),
                )
                prompts = Prompts(messages=[chat] * count, token_ids=[ids] * count)
                rows = backend.generate(prompts, sampling, count).completion_ids
                shares_by_case[kind, count, temperature] = sum(map(len, rows)), distinct(rows)
                print(
                    kind, count, temperature, shares_by_case[kind, count, temperature], flush=True
                )
    return shares_by_case


def main() -> None:
    """Generate, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "quickstart/smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a completion")
    options = parser.parse_args()
    if not options.model.exists():
        from examples.quickstart.models import smollm2

        smollm2(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    backend = TransformersBackend(
        lambda: nullcontext(model), pad_id=tokenizer.pad_token_id, device=model.device
    )
    shares_by_case = shares(backend, tokenizer, options.tokens)
    cells = [(count, temperature) for count in COUNTS for temperature in TEMPERATURES]
    saved = {key: 1 - few / all_of for key, (all_of, few) in shares_by_case.items()}
    lengths = {kind: fmean(shares_by_case[kind, c, t][0] / c for c, t in cells) for kind in PROMPTS}
    table = [
        [kind, f"{lengths[kind]:.0f}", *(f"{100 * saved[kind, *cell]:.1f}" for cell in cells)]
        for kind in PROMPTS
    ]
    names = [f"k = {count}, T = {temperature:g}" for count, temperature in cells]
    text = (
        "# Prefixes that completions share beyond their prompt\n\n"
        "Percentage of completion tokens that a tree of the completions would save, because\n"
        "another completion of the group begins with the same tokens. SmolLM2-135M-Instruct, at\n"
        f"most {options.tokens} tokens, k completions of a prompt at temperature T; the length is\n"
        "the mean.\n\n"
        f"Made by `make bench-siblings` on {platform.machine()}, torch {torch.__version__}.\n\n"
        + markdown(["prompt", "length", *names], table)
        + "\n"
    )
    print(text)
    (ROOT / "docs/benchmarks/siblings.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
