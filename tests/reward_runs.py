"""Helpers for tests of reward models: tiny runs, and the loss written out row by row."""

import torch
from datasets import Dataset
from sft_runs import EOS, config
from tiny import tiny_model, tiny_tokenizer
from transformers import LlamaForSequenceClassification

from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

# Prompts of different lengths; pairs whose answers begin alike, are short, or are very unequal.
PAIRS = [
    *[("2+3=", "5", "6"), ("Say", " something much longer than that.", " some"), ("x", "yz", "")],
    *[("a longer prompt than others, ", "b", "bc"), ("q", "", "rrrr"), ("2+3=", "five", "four")],
]
RANKED = [
    ("2+3=", ["6", "5", "five, or 5", "5"], [3, 1, 2, 1]),
    ("Say", [" something", " some", ""], [2, 1, 3]),
    ("x", ["yz", "y"], [1, 2]),
]


def pairs(rows=PAIRS, **columns) -> Dataset:
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_dict(
        dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) | columns
    )


def ranked(rows=RANKED) -> Dataset:
    names = ("prompt", "answers", "ranks")
    return Dataset.from_dict(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def as_pairs(rows=RANKED) -> list[tuple[str, str, str]]:
    """All pairs of ranked answers; those of equal rank are none."""
    return [
        (prompt, better, worse)
        for prompt, answers, ranks in rows
        for i, better in enumerate(answers)
        for j, worse in enumerate(answers)
        if ranks[i] < ranks[j]
    ]


def classifier(seed: int = 1, **changes) -> LlamaForSequenceClassification:
    settings = tiny_model().config
    settings.num_labels = 1
    settings.update(changes)
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(settings)
    with torch.no_grad():
        model.score.weight.mul_(20)  # so that scores differ
    return model


def make_trainer(folder, data=None, model=None, tokenizer=None, **changes):
    names = ("callbacks", "eval_dataset", "peft_config", "quantization_config", "optimizers")
    others = {name: changes.pop(name) for name in names if name in changes}
    return RewardTrainer(
        classifier() if model is None else model,
        config(folder, kind=RewardConfig, **changes),
        train_dataset=pairs() if data is None else data,
        processing_class=tiny_tokenizer() if tokenizer is None else tokenizer,
        **others,
    )


def score(model, prompt, answer):
    """The layer of the score on the last state of a row alone, without padding."""
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer(prompt)["input_ids"], *tokenizer(answer)["input_ids"], EOS]
    return model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])[0]


def by_hand(model, rows=PAIRS, margins=None, centering=0.0):
    """Mean loss, its gradient, and the scores of both sides, one row at a time."""
    total, scores = torch.zeros(()), []
    margins = margins or [0.0] * len(rows)
    for (prompt, chosen, rejected), margin in zip(rows, margins, strict=True):
        c, r = score(model, prompt, chosen), score(model, prompt, rejected)
        total = total + torch.log1p(torch.exp(-(c - r - margin))) + centering * (c + r) ** 2
        scores.append((float(c.detach()), float(r.detach())))
    model.zero_grad()
    (total / len(rows)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return float(total.detach()) / len(rows), gradient, scores
