"""Where trainers hook into the loop of transformers."""

import time

import pytest
import torch
from datasets import Dataset
from online_runs import (
    dataset,
    make_trainer,
    rows_of,
    token_sum,
    weights,
)
from tiny import tiny_model, tiny_tokenizer
from transformers import TrainerCallback

from trl.algorithms.sft import SFT
from trl.batch import Batch, Branch, Group, with_totals
from trl.imports import TESTED
from trl.models.scorer import Scorer
from trl.trainer.base import policy
from trl.trainer.base.base_config import BaseConfig
from trl.trainer.base.base_trainer import BaseTrainer
from trl.trainer.base.policy import Policy
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.model_card import Method
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.types import Prefix


def mean_reward(prompts, group_size=4):
    rewards = token_sum([ids for _, ids in rows_of(prompts, group_size)])
    return sum(rewards) / len(rewards)


def test_several_evaluation_datasets(tmp_path):
    """Each has its own prefix; a name may itself end like a metric."""
    sets = {"easy": ["xy", "z"], "hard_loss": ["w", "vu"]}
    trainer = make_trainer(
        tmp_path,
        eval_dataset={name: dataset(prompts) for name, prompts in sets.items()},
        per_device_eval_batch_size=8,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
    )
    trainer.train()
    history = trainer.state.log_history
    assert mean_reward(sets["easy"]) != mean_reward(sets["hard_loss"])
    for name, prompts in sets.items():
        entries = [entry for entry in history if f"eval_{name}_runtime" in entry]
        assert [entry["step"] for entry in entries] == [1, 2]
        for entry in entries:
            assert entry[f"eval_{name}_reward"] == pytest.approx(mean_reward(prompts), abs=1e-5)
            assert entry[f"eval_{name}_frac_reward_zero_std"] == 0.0
            ours = [key for key in entry if key.startswith("eval_")]
            assert all(key.startswith(f"eval_{name}_") for key in ours)
    trained = [entry for entry in history if "loss" in entry]
    assert len(trained) == 2
    assert not any(key.startswith("eval_") for entry in trained for key in entry)


def test_evaluation_sets_by_name(tmp_path):
    sets = {name: dataset(["xy"]) for name in ("easy", "hard")}
    trainer = make_trainer(tmp_path, eval_dataset=sets, per_device_eval_batch_size=4)
    assert "eval_loss" in trainer.evaluate("hard")
    with pytest.raises(ValueError, match=r"eval_dataset has no 'heard'\. Did you mean hard\?"):
        trainer.evaluate("heard")
    with pytest.raises(ValueError, match=r"eval_dataset has no 'zzz'\. Its names: easy, hard\."):
        trainer.evaluate("zzz")


def test_evaluation_under_another_prefix(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=dataset(["xy"]), per_device_eval_batch_size=4)
    found = trainer.evaluate(dataset(["z", "w"]), metric_key_prefix="test")
    assert found["test_reward"] == pytest.approx(mean_reward(["z", "w"]), abs=1e-5)
    # Nothing of it is left for the next one.
    assert trainer.evaluate()["eval_reward"] == pytest.approx(mean_reward(["xy"]), abs=1e-5)


def test_step_time(tmp_path):
    """The mean over the steps of a log of the seconds of all their micro-batches."""

    def slow(completion_ids, **kwargs):
        time.sleep(0.2)
        return token_sum(completion_ids)

    trainer = make_trainer(
        tmp_path,
        reward=slow,
        reward_dry_run=False,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        max_steps=2,
        logging_steps=2,
    )
    started = time.perf_counter()
    trainer.train()
    elapsed = time.perf_counter() - started
    (found,) = [e["step_time"] for e in trainer.state.log_history if "step_time" in e]
    assert 0.4 <= found <= elapsed / 2


@pytest.mark.parametrize(
    ("rewards", "zero_std", "without_baseline"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 0.0, 0.0),
        ([1.0, 1.0, 1.0, 1.0, 5.0, 6.0, 7.0, 8.0], 0.5, 0.0),
        ([1.0] * 4 + [0.0] * 4, 1.0, 0.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0, None, None, None], 0.5, 0.5),
        ([1.0, 2.0, 3.0, None, 5.0, 6.0, None, None], 0.0, 0.0),
    ],
)
def test_shares_of_groups(tmp_path, rewards, zero_std, without_baseline):
    trainer = make_trainer(
        tmp_path, reward=lambda completion_ids, **kwargs: rewards, reward_dry_run=False
    )
    trainer.train()
    entry = trainer.state.log_history[0]
    scored = [reward for reward in rewards if reward is not None]
    assert entry["reward"] == pytest.approx(sum(scored) / len(scored))
    assert entry["frac_groups_without_baseline"] == without_baseline
    assert entry["frac_reward_zero_std"] == zero_std


def test_tokens_are_counted_in_training_alone(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=dataset(["xy"]), per_device_eval_batch_size=4)
    trainer.train()
    expected = sum(len(prompt) + len(ids) for prompt, ids in rows_of(["ab", "cde"], 4))
    assert trainer.state.log_history[0]["num_tokens"] == expected
    assert trainer.evaluate()["eval_num_tokens"] == expected


def test_the_batch_plan_is_printed(tmp_path, capsys):
    make_trainer(tmp_path).train()
    assert "each update: 2 prompts x 4 completions = 8 sequences" in capsys.readouterr().out


@pytest.mark.parametrize(("newest", "warnings"), [("5.0", 1), ("999.0", 0)])
def test_a_version_of_transformers_that_is_not_tested_is_named(
    tmp_path, monkeypatch, newest, warnings
):
    said = []
    monkeypatch.setitem(TESTED, "transformers", ("5.0", newest))
    monkeypatch.setattr(policy.logger, "warning_once", said.append)
    make_trainer(tmp_path)
    assert len([x for x in said if "was tested with (5.0 to" in x]) == warnings


# --- A trainer that generates nothing ---


class Documents(BaseTrainer):
    """Trains on the text of rows: what an offline trainer adds to the loop, and no more."""

    method = Method("Documents", "documents", "A title", "none", "")

    def make_algorithm(self):
        return SFT()

    def take_step(self, inputs, mode):
        self.seen = [*getattr(self, "seen", []), mode]
        batches = []
        for rows in inputs:
            texts = [self.processing_class(row["text"])["input_ids"] for row in rows]
            branches = [(Branch(ids, [True] * len(ids)),) for ids in texts]
            groups = [Group(Prefix([]), branch, row) for row, branch in enumerate(branches)]
            batches.append(Batch.of(groups, mode=mode))
        return with_totals(batches, self.ranks)

    def score(self, model, batch):
        scores = self.scorer(model, batch.rows)
        self.guard.watch("log-probability", scores.logps, batch.rows, None)
        return batch, scores


def documents(folder, **changes):
    texts = ["abcd", "bcde", "cdef", "defg"]
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "optim": "sgd"}
    settings |= {"per_device_train_batch_size": 2, "learning_rate": 0.01, "logging_steps": 1}
    args = BaseConfig(str(folder), **(settings | {"max_steps": 3, "save_strategy": "no"} | changes))
    args.remove_unused_columns = False
    rows = Dataset.from_dict({"text": texts})
    trainer = Documents(
        Policy(tiny_model(), tiny_tokenizer(), False),
        args,
        data_collator=list,
        train_dataset=rows,
        eval_dataset=rows,
    )
    trainer.scorer = Scorer(pad_id=0, temperature=1.0, device=args.device)
    trainer.runner.reset_hooks.append(trainer.scorer.forget)
    return trainer


def test_the_loop_needs_neither_prompts_nor_rewards(tmp_path):
    """It trains, evaluates and resumes to the last bit."""
    whole = documents(tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    assert whole.seen == ["train"] * 3
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert "memory/backward/peak_gb" in whole.state.log_history[0]
    resumed = documents(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    whole.seen.clear()
    assert whole.evaluate()["eval_loss"] > 0 and set(whole.seen) == {"eval"}


def test_the_loop_goes_on_after_running_out_of_memory(tmp_path):
    small = documents(tmp_path / "small", max_steps=2, gradient_accumulation_steps=2)
    small.phases.batches["training"].size = 1
    small.train()
    short = documents(tmp_path / "short", max_steps=2, gradient_accumulation_steps=2)
    loss, failures = short.compute_loss, []

    def scarce(model, inputs, *others, **options):
        if len(inputs) > 1:
            failures.append(len(inputs))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss(model, inputs, *others, **options)

    short.compute_loss = scarce
    short.train()
    assert failures == [2] and short.phases.batches["training"].size == 1
    assert torch.equal(weights(short.model), weights(small.model))


@pytest.mark.parametrize("kind", [RLOOTrainer, GRPOTrainer])
def test_options_that_a_callback_changes_reach_the_loss(tmp_path, kind):
    """The second update clips at other ratios than in a run whose options stay."""

    class Narrow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.epsilon = 0.0

    common = {"num_iterations": 3, "max_steps": 3, "learning_rate": 2.0}
    runs = []
    for name, callbacks in (("changed", [Narrow()]), ("not", [])):
        trainer = make_trainer(tmp_path / name, kind, callbacks=callbacks, **common)
        trainer.train()
        runs.append([entry["loss"] for entry in trainer.state.log_history[:3]])
    changed, unchanged = runs
    assert changed[0] == unchanged[0]
    assert abs(changed[1] - unchanged[1]) > 1e-3
