"""Helpers for tests of KTO: tiny runs, and the loss written out row by row."""

import torch
from datasets import Dataset
from sft_runs import config, encoded
from tiny import tiny_model, tiny_tokenizer

from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

# Prompts of different lengths, two of them equal; answers of both labels, more of one.
ROWS = [
    *[("2+3=", "5", True), ("Say", " something much longer than that.", True), ("x", "yz", False)],
    *[("a longer prompt than others, ", "b", True), ("q", "rrr", False), ("2+3=", "six", False)],
    *[("one two three ", "four", True), ("ab", "cd", True)],
]


def labelled(rows=ROWS) -> Dataset:
    names = ("prompt", "completion", "label")
    columns = map(list, zip(*rows, strict=True))
    return Dataset.from_dict(dict(zip(names, columns, strict=True)))


def other_model():
    """A reference that differs from the policy, so that KL and rewards are not 0."""
    return tiny_model(seed=3)


def make_trainer(folder, data=None, model=None, ref_model=None, **changes):
    names = ("callbacks", "eval_dataset", "peft_config", "quantization_config", "optimizers")
    others = {name: changes.pop(name) for name in names if name in changes}
    return KTOTrainer(
        tiny_model() if model is None else model,
        other_model() if ref_model is None else ref_model or None,
        config(folder, KTOConfig, **changes),
        train_dataset=labelled() if data is None else data,
        processing_class=tiny_tokenizer(),
        **others,
    )


def log_prob(model, prompt, completion):
    """Log-probability of a completion with its end, alone, from full logits."""
    ids, first = encoded(prompt, completion)
    logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return sum((logps[place - 1, ids[place]] for place in range(first, len(ids))), torch.zeros(()))


def partners_of(trainer, rows=ROWS) -> list[str]:
    """The completion that is scored under the prompt of each row, as the trainer chose it."""
    decoder = tiny_tokenizer()
    answers = trainer.train_dataset["kl_completion_ids"][: len(rows)]
    return [decoder.decode(ids[:-1]) for ids in answers]


def by_hand(model, reference, partners, rows=ROWS, beta=0.1, weights=(1.0, 1.0), kl=True):
    """Mean loss, its gradient, the KL estimate and the log-ratios, one row at a time."""
    with torch.no_grad():
        refs = [log_prob(reference, p, c) for p, c, _ in rows]
        apart = [
            log_prob(model, p, other) - log_prob(reference, p, other)
            for (p, _, _), other in zip(rows, partners, strict=True)
        ]
    estimate = max(0.0, float(sum(apart)) / len(rows)) if kl else 0.0
    total, ratios = torch.zeros(()), []
    for (prompt, completion, label), ref in zip(rows, refs, strict=True):
        ratio = log_prob(model, prompt, completion) - ref
        away = beta * (ratio - estimate)
        value = 1 - torch.sigmoid(away if label else -away)
        total = total + weights[0 if label else 1] * value
        ratios.append(float(ratio.detach()))
    model.zero_grad()
    (total / len(rows)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return float(total.detach()) / len(rows), gradient, estimate, ratios
