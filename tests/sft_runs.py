"""Helpers for tests of supervised fine-tuning: tiny runs, and the loss written out row by row."""

import torch
from datasets import Dataset
from tiny import ONE_UPDATE, tiny_model, tiny_tokenizer

from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

EOS = 1
# Prompts of different lengths, each with its completion; one prompt is there twice.
PAIRS = [
    *[("2+3=", "5"), ("Say", " something much longer than that."), ("x", "yz"), ("2+3=", "7")],
    *[("a longer prompt than others, ", "b"), ("q", ""), ("ab", "cd"), ("one two three ", "four")],
]


def pairs(rows=PAIRS) -> Dataset:
    return Dataset.from_dict({"prompt": [p for p, _ in rows], "completion": [c for _, c in rows]})


def texts(count=12) -> Dataset:
    """Texts of 2 to 40 tokens."""
    return Dataset.from_dict(
        {"text": [("abc " * (1 + 7 * i % 10))[: 1 + 3 * i] for i in range(count)]}
    )


def config(folder, kind=SFTConfig, **changes):
    settings = ONE_UPDATE | {"train_sampling_strategy": "sequential", "max_length": 64}
    return kind(str(folder), **(settings | changes))


def make_trainer(folder, data=None, model=None, tokenizer=None, kind=SFTTrainer, **changes):
    names = ["callbacks", "eval_dataset", "peft_config", "formatting_func", "optimizers"]
    names += ["compute_metrics", "preprocess_logits_for_metrics"]
    others = {name: changes.pop(name) for name in names if name in changes}
    return kind(
        tiny_model() if model is None else model,
        config(folder, kind.config_class, **changes),
        train_dataset=pairs() if data is None else data,
        processing_class=tiny_tokenizer() if tokenizer is None else tokenizer,
        **others,
    )


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def direction(trainer) -> torch.Tensor:
    """Train one step of plain SGD and return the gradient it used."""
    before = weights(trainer.model)
    trainer.train()
    return (before - weights(trainer.model)) / trainer.args.learning_rate


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def relative(ours, reference) -> float:
    return float((ours - reference).norm() / reference.norm())


def encoded(prompt, completion):
    """Token ids of prompt and completion, and the first of them that is trained."""
    tokenizer = tiny_tokenizer()
    first = tokenizer(prompt)["input_ids"]
    return [*first, *tokenizer(completion)["input_ids"], EOS], len(first)


def by_hand(model, rows, weigh=lambda p: torch.ones_like(p)):
    """Mean loss, its gradient, mean entropy and share of hits, one row at a time.

    Args:
        rows: (ids, first trained token) each.
        weigh: factor of each loss, from the token's probability.
    """
    total, entropy, hits, count = torch.zeros(()), 0.0, 0, 0
    for ids, first in rows:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        for place in range(max(first, 1), len(ids)):
            logps = logits[place - 1] - torch.logsumexp(logits[place - 1], 0)
            probability = logps[ids[place]].detach().exp()
            total = total - weigh(probability) * logps[ids[place]]
            entropy -= float((logps.exp() * logps).sum().detach())
            hits += int(logps.argmax()) == ids[place]
            count += 1
    model.zero_grad()
    (total / count).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return float(total.detach()) / count, gradient, entropy / count, hits / count
