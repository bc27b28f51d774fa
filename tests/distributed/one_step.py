"""Two updates and an evaluation, under each engine in turn: `one_step.py FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from engines import ENGINES, finish, report, use
from online_runs import dataset, make_trainer
from reward_runs import classifier
from tiny import tiny_model

from trl.algorithms.base import LossTerms
from trl.batch import Batch
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.types import TokenScores

MANY = [f"{chr(97 + i)}{i}" for i in range(8)]
# Groups of 4 lie within ranks, groups of 8 on both.
CELLS: dict[str, dict[str, Any]] = {
    "reference": {
        "num_generations": 8,
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
    },
    "skip": {"num_generations": 4, "non_finite": "skip"},
    "Online DPO": {"kind": OnlineDPOTrainer, "num_generations": 2, "beta": 0.1},
    "PPO": {
        "kind": PPOTrainer,
        "num_generations": 2,
        "beta": 0.1,
        "num_ppo_epochs": 2,
        "whiten_rewards": True,
    },
    "PPO with a value model": {"kind": PPOTrainer, "num_generations": 2, "num_ppo_epochs": 1},
}


def run(cell: str, folder: Path, rows: int, **changes: Any) -> dict[str, Any]:
    """Train a cell with `rows` in a micro-batch; the first rank says what it did."""
    options = {"kind": RLOOTrainer} | CELLS[cell] | changes
    rows //= options["kind"].config_class.unit
    if cell == "PPO with a value model":
        options["value_model"] = classifier()
    trainer = make_trainer(
        folder,
        script=None,
        model=tiny_model(tie_word_embeddings=cell == "reference"),
        data=dataset(MANY),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        shuffle_dataset=True,
        max_steps=2,
        eval_dataset=dataset(MANY[4:]),
        per_device_eval_batch_size=rows,
        **options,
    )
    if cell == "skip":
        spoil(trainer)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    trainer.evaluate()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    reference = getattr(trainer.reference, "model", trainer.model)
    found = {"held": [held(model) for model in (trainer.model, reference)]}
    if trainer.is_world_process_zero():
        found |= {
            "weights": torch.cat([state[name].flatten() for name in sorted(trained)]),
            "history": trainer.state.log_history,
            "train": _records(folder, "train"),
            "eval": _records(folder, "eval"),
        }
    return found


def spoil(trainer: Any) -> None:
    """Let the last rank have a gradient of NaN in the first update."""
    right = trainer.loss

    def loss(scores: TokenScores, batch: Batch) -> LossTerms:
        last = trainer.ranks.rank == trainer.ranks.count - 1
        wrong = batch.mode == "train" and trainer.state.global_step == 0 and last
        factor = torch.nan if wrong else 1.0
        return {name: (x * factor, total) for name, (x, total) in right(scores, batch).items()}

    trainer.loss = loss


def held(model: torch.nn.Module) -> int:
    """How many numbers of a model's weights this rank holds."""
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    parts += [p.ds_tensor for p in parts if hasattr(p, "ds_tensor")]
    return sum(part.numel() for part in parts)


def _records(folder: Path, mode: str) -> list[dict[str, Any]]:
    lines = (folder / "completions" / f"{mode}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main(folder: str) -> None:
    found: dict[Any, Any] = {}
    for engine in ENGINES:
        for cell in CELLS:
            use(engine)
            found[engine, cell] = run(cell, Path(folder, engine, cell), 4, use_cpu=False)
    report(found)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
