"""Parts of `gpu_check.py` that are no benchmark: `gpu_parts.py NAME --device cuda`.

Each prints its results as lines of JSON, as they come, and fails where a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import synthetic
import torch
from datasets import Dataset

from trl import RLOOConfig, RLOOTrainer

WORDS = 64  # of the vocabulary in which the model is to prefer one half
BOUNDS = {"float32": 1e-5, "bfloat16": 0.05}  # of relative differences of gradients


@dataclass(frozen=True)
class Size:
    """The sizes of the parts; lengths are in tokens."""

    device: str
    shape: str = "135m"
    rows: int = 32
    prompt: int = 256
    completion: int = 64
    updates: int = 50


def tiny(device: str) -> Size:
    """Return the smallest sizes, to try the program."""
    return Size(device, "small", 16, 8, 6, 3)


def trainer_of(
    size: Size, reward: Callable[..., list[float]], vocabulary: int = WORDS, **options: Any
) -> RLOOTrainer:
    """Make a trainer of a random model on random prompts of different lengths."""
    model = synthetic.make_model(size.shape, vocabulary, size.prompt + size.completion + 8)
    texts = synthetic.prompts(size.rows, size.prompt, vocabulary, ragged=True)
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="gpu-check-"),
        "use_cpu": size.device == "cpu",
        "per_device_train_batch_size": size.rows,
        "num_generations": 4,
        "max_completion_length": size.completion,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "reward_dry_run": False,
    }
    return RLOOTrainer(
        model=model,
        reward_funcs=reward,
        args=RLOOConfig(**(settings | options)),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=synthetic.make_tokenizer(vocabulary),
    )


def lower_half(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward the share of words in the lower half of the vocabulary."""
    return [sum(i < WORDS // 2 for i in ids) / len(ids) for ids in completion_ids]


def learn(size: Size) -> Iterator[dict[str, Any]]:
    """Make twelve updates in bfloat16 with a reward that is easy to increase."""
    trainer = trainer_of(size, lower_half, bf16=True, learning_rate=1e-3, max_steps=12)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    early = sum(rewards[:3]) / 3
    late = sum(rewards[-3:]) / 3
    yield {"reward before": round(early, 3), "after": round(late, 3), "ok": late > early}


def one_update(size: Size, **options: Any) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Return the weight changes of one SGD update, and the completions it was computed on."""
    seen: list[list[int]] = []

    def remember(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(i % 3) for i in range(len(completion_ids))]

    trainer = trainer_of(size, remember, optim="sgd", learning_rate=1.0, max_steps=1, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    after = trainer.model.named_parameters()
    return {name: (p.detach() - before[name].to(p.device)).cpu() for name, p in after}, seen


def equality(size: Size) -> Iterator[dict[str, Any]]:
    """Compare shared prompts and the bounded head with plain rows and full logits."""
    plain = {"shared_prefix": False, "logits_chunk_size": 0, "reuse_sampling_logps": False}
    same = {"max_grad_norm": 0.0, "beta": 0.05}
    for precision, bound in BOUNDS.items():
        options = same | {"bf16": precision == "bfloat16"}
        ours, tokens = one_update(size, **options)
        theirs, expected = one_update(size, **options, **plain)
        pairs = list(zip(chain(*tokens), chain(*expected), strict=True))
        alike = sum(a == b for a, b in pairs) / len(pairs)
        apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in ours) ** 0.5
        size_of = sum(float(change.square().sum()) for change in theirs.values()) ** 0.5
        result = {"precision": precision, "same tokens": round(alike, 4)}
        if alike < 1:  # other tokens have other gradients
            yield result | {"ok": precision == "bfloat16"}
            continue
        yield result | {"gradient apart": apart / size_of, "ok": apart <= bound * size_of}


def fragmentation(size: Size) -> Iterator[dict[str, Any]]:
    """Measure what the allocator reserves beyond allocations after many updates."""
    trainer = trainer_of(size, lower_half, 32_000, max_steps=size.updates, bf16=True)
    trainer.train()
    if size.device == "cpu":
        yield {"updates": size.updates, "said": "a CPU reserves nothing", "ok": True}
        return
    allocated = torch.cuda.max_memory_allocated()
    share = torch.cuda.max_memory_reserved() / allocated - 1
    result = {"updates": size.updates, "allocated MB": round(allocated / 1e6)}
    yield result | {"reserved beyond": round(share, 4), "ok": share <= 0.05}


PARTS = {"learn": learn, "equality": equality, "fragmentation": fragmentation}


def main() -> int:
    """Print the results of one part, and return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the least sizes, to try the program")
    options = parser.parse_args()
    size = tiny(options.device) if options.tiny else Size(options.device)
    broken = 0
    line = sys.stdout
    sys.stdout = sys.stderr  # trainers print as well
    for result in PARTS[options.part](size):
        print(json.dumps(result), file=line, flush=True)
        broken += not result["ok"]
    return broken


if __name__ == "__main__":
    sys.exit(main())
