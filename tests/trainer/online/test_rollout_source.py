"""A round follows from its identity, its prompts and the weights, and from nothing else."""

import dataclasses

import online_runs as runs
import ppo_runs
import torch
from online_runs import PROMPTS, make_trainer

from trl.trainer.online.rollout_source import RoundId

ROWS = [{"prompt": prompt} for prompt in PROMPTS[:2] for _ in range(4)]


def test_seeds_of_training_follow_from_the_number_of_the_round():
    seeds = RoundId(3, version=5).seeds(42, first_row=0, count=4)
    assert len(set(seeds)) == 4
    assert seeds == RoundId(3, version=9).seeds(42, 0, 4), "whatever weights generate"
    assert seeds[2:] == RoundId(3, version=5).seeds(42, 2, 2), "however ranks divide the rows"
    others = RoundId(4, 5), RoundId(3, 5, "eval")
    found = [seeds, RoundId(3, 5).seeds(43, 0, 4), *(other.seeds(42, 0, 4) for other in others)]
    assert len(set(found)) == 4


def test_batches_of_evaluations_at_different_steps_have_different_seeds():
    assert RoundId(0, 1, "eval").seeds(42, 0, 2) != RoundId(0, 2, "eval").seeds(42, 0, 2)


def test_a_round_does_not_depend_on_what_the_trainer_did_before(tmp_path):
    trainer = make_trainer(tmp_path, script=None)
    first = RoundId(2, version=0)

    def completions(round_id):
        rollouts = trainer.source.take(round_id, ROWS, trainer.state)
        assert rollouts.round_id == round_id
        return rollouts.generations.completion_ids

    expected = completions(first)
    trainer.state.global_step, trainer.num_rounds = 7, 9
    torch.manual_seed(1)
    assert completions(first) == expected
    assert completions(dataclasses.replace(first, number=3)) != expected


def test_what_a_round_is_made_of(tmp_path):
    trainer = make_trainer(tmp_path, mask_truncated_completions=True)
    rollouts = trainer.source.take(RoundId(0, 0), ROWS, trainer.state)
    batch = rollouts.step.batch
    assert batch.group_sizes == [4, 4] and batch.mode == "train"
    assert rollouts.step.rewards.total.tolist() == rollouts.table.total.tolist()
    assert rollouts.step.rewards.has_ended.all() and rollouts.table.ended is None
    assert len(rollouts.completions) == len(rollouts.prompts) == len(batch) == 8


def test_rounds_that_end_early_are_numbered_on_in_a_resumed_run(tmp_path):
    """A second pass moves the policy too far, so that the third one has a round of its own."""
    options = {"num_ppo_epochs": 3, "target_kl": 1e-9, "max_steps": 6, "learning_rate": 1e-2}
    options |= {"script": None, "save_strategy": "steps", "save_steps": 4, "ref_model": None}
    straight = ppo_runs.make(tmp_path, **options)
    straight.train()
    resumed = ppo_runs.make(tmp_path, **options)
    assert resumed.args.batch_plan.rounds_before(6) < straight.num_rounds
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert straight.num_rounds == resumed.num_rounds
    assert torch.equal(runs.weights(straight.model), runs.weights(resumed.model))


def test_a_run_without_its_state_numbers_rounds_by_updates(tmp_path):
    plan = make_trainer(tmp_path, num_iterations=2).args.batch_plan
    assert [plan.rounds_before(step) for step in range(5)] == [0, 1, 1, 2, 2]
