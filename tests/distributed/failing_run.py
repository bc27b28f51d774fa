"""Failures of one rank; `failing_run.py FOLDER WHERE...`, run by `engines`.

Failures that all ranks hear of are reported, with metrics; others end the process, so they must
come last.
"""

import os
import sys

import torch
from engines import finish, report
from online_runs import ReportingBackend, dataset, make_trainer, token_sum
from tiny import tiny_model

from trl.models.unwrap import causal_model
from trl.trainer.rloo_trainer import RLOOTrainer

RANK = int(os.environ["RANK"])
PROMPTS = ["ab", "cde", "f", "ghij"]
MISMATCH = {
    "top_p": 0.8,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_max_logp_gap": 0.1,
    "skip_zero_advantages": False,
}


class Mistake(ValueError):
    """What goes wrong on one rank."""


def fail(*args, **kwargs):
    raise Mistake("a planned failure")


def fail_on(rank):
    return fail if rank == RANK else lambda *args, **kwargs: None


class BadLoss(RLOOTrainer):
    """Fails between the forward and the backward pass."""

    def loss(self, *args):
        fail_on(1)()
        return super().loss(*args)


def bad_reward(completion_ids, **kwargs):
    """Fails on rank 1."""
    fail_on(1)()
    return token_sum(completion_ids)


def trainer_for(where, folder):
    """A trainer that fails in a place."""
    options = {
        "data": dataset(PROMPTS),
        "reward": bad_reward if where == "reward" else token_sum,
        "kind": BadLoss if where == "loss" else RLOOTrainer,
        "reward_dry_run": False,
        "per_device_train_batch_size": 4,
        "ds3_gather_for_generation": not where.startswith("layerwise"),
        "ddp_timeout": 120,
        "shared_prefix": not where.startswith("padded"),
        "save_strategy": "steps" if where == "checkpoint" else "no",
        "save_steps": 1,
        **(MISMATCH if where == "mismatch" else {}),
    }
    trainer = make_trainer(folder, script=None, use_cpu=False, **options)
    if where == "mismatch":  # of 0.4 nats, on rank 1 alone
        trainer.backend = ReportingBackend(tiny_model(), lambda row, place: 0.4 * RANK)
    if where == "prompts":
        trainer.source.encode = fail_on(1)
    if where == "checkpoint" and RANK == 0:  # the others wait for the checkpoint to be complete
        trainer._save = fail
    decoder = causal_model(trainer.model).base_model
    if where.endswith("sampling") and RANK == 1:  # between two forwards
        trainer.backend._heads.find = fail
    if where.endswith("forward"):  # rank 0 waits for the next layer
        decoder.layers[0].mlp.register_forward_hook(fail_on(1))
    return trainer


def main(folder, places):
    heard = {}
    for where in places:
        trainer = trainer_for(where, folder)
        try:
            trainer.train()
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            heard[where] = (type(error).__name__, str(error), list(notes))
            if where == "mismatch":
                heard["metrics"] = trainer.metrics["train"].flush(trainer.ranks.gather_objects)
            if where == places[-1]:
                raise
        torch.distributed.barrier()
        report(heard)
    return heard


if __name__ == "__main__":
    main(sys.argv[1], [*sys.argv[2:]])
    finish()
