"""Helpers for tests of DPO: tiny runs, and the losses written out pair by pair."""

import math

import torch
from datasets import Dataset
from sft_runs import config as sft_config
from tiny import tiny_model, tiny_tokenizer
from torch.nn.functional import logsigmoid
from transformers import TrainerCallback

from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

EOS = 1
# The sums over the tokens of answers amplify rounding, in padded rows as much as in packed ones.
BOUND = 2e-5
# Prompts and answers of different lengths; one prompt is there twice, answers may begin alike.
PAIRS = [
    *[("2+3=", "5", "6, or not"), ("Say", " something much longer", " nothing"), ("x", "yz", "y")],
    *[("2+3=", "five", "55"), ("a longer prompt than others, ", "b", "c"), ("q", "", "r")],
    *[("ab", "cd", "ce"), ("one two three ", "four", "five six seven eight nine ten")],
]


def pairs(rows=PAIRS) -> Dataset:
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_dict(dict(zip(names, zip(*rows, strict=True), strict=True)))


def settings(**changes):
    """Options of one update of plain SGD."""
    common = {"max_length": None, "beta": 0.1, "learning_rate": 0.1}
    plain = sft_config("folder").to_dict()
    names = (
        *("use_cpu", "bf16", "gradient_checkpointing", "report_to", "disable_tqdm", "optim"),
        *("train_sampling_strategy", "per_device_train_batch_size", "max_steps", "save_strategy"),
        *("lr_scheduler_type", "max_grad_norm", "logging_steps", "log_memory"),
    )
    return {name: plain[name] for name in names} | common | changes


def config(folder, **changes):
    return DPOConfig(str(folder), **settings(**changes))


def make_trainer(folder, data=None, model=None, tokenizer=None, **changes):
    names = ("callbacks", "eval_dataset", "peft_config", "ref_model", "optimizers")
    names += ("quantization_config",)
    others = {name: changes.pop(name) for name in names if name in changes}
    return DPOTrainer(
        tiny_model() if model is None else model,
        args=config(folder, **changes),
        train_dataset=pairs() if data is None else data,
        processing_class=tiny_tokenizer() if tokenizer is None else tokenizer,
        **others,
    )


class _Gradient(TrainerCallback):
    found: torch.Tensor

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        grads = [p.grad for p in kwargs["model"].parameters()]
        self.found = torch.cat([grad.detach().clone().flatten() for grad in grads])


def gradient_of(trainer) -> torch.Tensor:
    """Train an update and return the gradient it used."""
    watch = _Gradient()
    trainer.add_callback(watch)
    trainer.train()
    return watch.found


def other_model():
    """A reference that is not the policy."""
    return tiny_model(seed=1)


def encoded(rows=PAIRS):
    """Ids of prompt, chosen and rejected answer."""
    tokenizer = tiny_tokenizer()
    return [
        (tokenizer(p)["input_ids"], *(tokenizer(a)["input_ids"] + [EOS] for a in answers))
        for p, *answers in rows
    ]


def token_logps(model, rows):
    """Log-probabilities of the tokens of each answer; all rows padded to one rectangle."""
    flat = [(prompt, answer) for prompt, *answers in rows for answer in answers]
    width = max(len(prompt) + len(answer) for prompt, answer in flat)
    ids, mask = torch.zeros(2, len(flat), width, dtype=torch.long)
    for row, (prompt, answer) in enumerate(flat):
        both = [*prompt, *answer]
        ids[row, : len(both)], mask[row, : len(both)] = torch.tensor(both), 1
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logps = logits.log_softmax(-1)
    chosen = logps.gather(2, ids[:, 1:, None]).squeeze(2)
    collisions = (2 * logps).logsumexp(2)
    found = []
    for row, (prompt, answer) in enumerate(flat):
        at = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        found.append((chosen[row, at], collisions[row, at]))
    return [found[i : i + 2] for i in range(0, len(found), 2)]


def ld_sum(logps, other, alpha):
    """The sum in which tokens beyond the length of both answers weigh alpha."""
    shared = min(len(logps), len(other))
    return logps[:shared].sum() + alpha * logps[shared:].sum()


def sorted_margins(x):
    """Smoothed losses of differences of sorted values."""
    return -0.9 * logsigmoid(0.1 * x) - 0.1 * logsigmoid(-0.1 * x)


def losses_of(name, c, r, n, m):
    """Loss of pairs with log-ratios c and r and lengths n and m, for the default options."""
    d = 0.1 * (c - r)
    return {
        "sigmoid": lambda: -logsigmoid(d),
        "smoothed": lambda: -0.9 * logsigmoid(d) - 0.1 * logsigmoid(-d),
        "hinge": lambda: (1 - d).relu(),
        "ipo": lambda: (c / n - r / m - 5) ** 2,
        "exo_pair": lambda: (
            d.sigmoid() * (logsigmoid(d) - math.log(0.9))
            + (-d).sigmoid() * (logsigmoid(-d) - math.log(0.1))
        ),
        "nca_pair": lambda: (
            -logsigmoid(0.1 * c) - logsigmoid(-0.1 * c) / 2 - logsigmoid(-0.1 * r) / 2
        ),
        "robust": lambda: (-0.9 * logsigmoid(d) + 0.1 * logsigmoid(-d)) / 0.8,
        "bco_pair": lambda: -logsigmoid(0.1 * c) - logsigmoid(-0.1 * r),
        "sppo_hard": lambda: (c - 5) ** 2 + (r + 5) ** 2,
        "apo_zero": lambda: 1 - (0.1 * c).sigmoid() + (0.1 * r).sigmoid(),
        "apo_down": lambda: (0.1 * c).sigmoid() + 1 - d.sigmoid(),
        "discopop": lambda: (
            -logsigmoid(d) * (1 - (d / 0.05).sigmoid()) + (-d).exp() * (d / 0.05).sigmoid()
        ),
        "sigmoid_norm": lambda: -logsigmoid(0.1 * (c / n - r / m)),
        "aot_unpaired": lambda: sorted_margins(c.sort().values - r.sort().values),
    }[name]()


def by_hand(policy, reference, name="sigmoid", rows=PAIRS, **options):
    """Loss, its gradient, log-ratios (B, 2) and log-probabilities (B, 2) of the policy.

    Args:
        reference: a model, or None for one that gives all answers the same probability.
        options: `alpha` of ld_alpha, `weighting`, `nll` (weight of chosen answers' likelihood) and
            `divergence` (a function of log-ratios).
    """
    answers = token_logps(policy, encoded(rows))
    with torch.no_grad():
        known = answers if reference is None else token_logps(reference, encoded(rows))
    alpha = options.get("alpha", 1.0)

    def sums(found):
        return torch.stack(
            [torch.stack([ld_sum(a[0], b[0], alpha), ld_sum(b[0], a[0], alpha)]) for a, b in found]
        )

    logps, fixed = sums(answers), sums(known).detach() * (reference is not None)
    ratios = logps - fixed
    lengths = torch.tensor([[len(a[0]), len(b[0])] for a, b in answers])
    if name == "aot":
        margins = (x[:, 0] - x[:, 1] for x in (logps, fixed))
        losses = sorted_margins(next(margins).sort().values - next(margins).sort().values)
    elif name is None:
        losses = torch.zeros(len(rows))
    else:
        mapped = options.get("divergence", lambda x: x)(ratios)
        losses = losses_of(name, *mapped.unbind(1), *lengths.unbind(1))
    if options.get("weighting"):
        weights = [[(x[0] - x[1]).mean().exp().detach() for x in pair] for pair in answers]
        losses = losses * torch.tensor(weights).prod(1)
    chosen = torch.cat([pair[0][0] for pair in answers])
    total = losses.mean() - options.get("nll", 0.0) * chosen.mean()
    policy.zero_grad()
    total.backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])
    return float(total.detach()), gradient, ratios.detach(), logps.detach()
