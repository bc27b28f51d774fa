"""The metric that decides which model is best is known before training, and so are its options."""

import logging

import dpo_runs
import kto_runs
import online_dpo_runs
import online_runs
import ppo_runs
import pytest
import reward_runs
import sft_runs
from transformers import TrainerCallback

from trl import GRPOTrainer
from trl.trainer.grpo_config import GRPOConfig

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}


def grpo(folder, **changes):
    return online_runs.make_trainer(folder, GRPOTrainer, **changes)


def sft(folder, **changes):
    return sft_runs.make_trainer(folder, **{"eval_dataset": sft_runs.pairs()} | changes)


MAKERS = {
    "dpo": lambda folder: dpo_runs.make_trainer(folder, eval_dataset=dpo_runs.pairs()),
    "kto": lambda folder: kto_runs.make_trainer(folder, eval_dataset=kto_runs.labelled()),
    "reward": lambda folder: reward_runs.make_trainer(folder, eval_dataset=reward_runs.pairs()),
    "sft": sft,
    "rloo": lambda folder: online_runs.make_trainer(folder, eval_dataset=online_runs.dataset()),
    "grpo": lambda folder: grpo(folder, eval_dataset=online_runs.dataset(), beta=0.1),
    "online dpo": lambda folder: online_dpo_runs.make(folder, eval_dataset=online_runs.dataset()),
    "ppo": lambda folder: ppo_runs.make(folder, eval_dataset=online_runs.dataset()),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_metric_of_an_evaluation_is_known_beforehand(tmp_path, make):
    trainer = make(tmp_path)
    logged = {name.removeprefix("eval_") for name in trainer.evaluate()} - {"epoch"}
    assert logged <= trainer.metric_names()
    assert len(logged) > 6


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("eval_mean_token_acuracy", "Did you mean eval_mean_token_accuracy?"),
        ("mean_token_acuracy", "Did you mean eval_mean_token_accuracy?"),
        ("f1", "Evaluations log eval_aux_loss, eval_entropy, eval_loss,"),
    ],
)
def test_a_metric_that_is_not_logged_is_refused_before_training(tmp_path, metric, hint):
    trainer = sft(tmp_path, metric_for_best_model=metric, save_strategy="best", **EVALUATED)
    with pytest.raises(ValueError) as error:
        trainer.train()
    assert f"metric_for_best_model={metric!r} is not logged by evaluations. {hint}" in str(
        error.value
    )
    assert trainer.state.global_step == 0


def test_several_evaluation_sets_have_their_names_in_metrics(tmp_path):
    sets = {"short": sft_runs.pairs(), "long": sft_runs.pairs()}
    options = {"save_strategy": "best", "eval_dataset": sets} | EVALUATED
    with pytest.raises(
        ValueError, match="'loss' is not logged .* Did you mean eval_(long|short)_loss?"
    ):
        sft(tmp_path, metric_for_best_model="loss", **options).train()
    trainer = sft(tmp_path, metric_for_best_model="eval_long_loss", **options)
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(sft_runs.logged(trainer, "eval_long_loss")[0])


def test_names_of_reward_functions(tmp_path):
    options = {"eval_dataset": online_runs.dataset(), "save_strategy": "best"} | EVALUATED
    options |= {"per_device_eval_batch_size": 4}
    make = online_runs.make_trainer
    with pytest.raises(ValueError, match="Did you mean eval_rewards/token_sum/mean?"):
        make(tmp_path, metric_for_best_model="rewards/tokensum/mean", **options).train()
    make(tmp_path, metric_for_best_model="rewards/token_sum/mean", **options).check_settings()


class Own(TrainerCallback):
    """Adds a metric to each evaluation."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_wins"] = 0.5


def test_a_callback_may_log_the_metric(tmp_path, caplog):
    options = {"save_strategy": "best", "callbacks": [Own()]} | EVALUATED
    trainer = sft(tmp_path, metric_for_best_model="wins", **options)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "metric_for_best_model='wins' is not logged by evaluations." in caplog.text
    assert trainer.state.best_metric == 0.5
    with pytest.raises(ValueError, match="Did you mean eval_loss?"):
        sft(tmp_path, metric_for_best_model="eval_los", **options).train()


def test_without_evaluations_no_metric_is_looked_for(tmp_path):
    GRPOConfig(str(tmp_path), metric_for_best_model="x", use_cpu=True, report_to="none")
    sft(tmp_path, metric_for_best_model="x", eval_strategy="no").check_settings()
