"""Whole Online DPO steps against a loop over pairs."""

import online_runs as runs
import pytest
import torch
from online_dpo_runs import TEMPERATURE, make, paper_gradient
from online_runs import dataset, records, relative, step_direction, token_sum
from tiny import tiny_model, tiny_tokenizer

from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "ipo"},
        {"beta": [0.2]},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"shared_prefix": False, "logits_chunk_size": 0},
    ],
)
def test_one_step_is_the_papers(tmp_path, changes):
    rows = runs.rows_of(runs.PROMPTS, 2)
    rewards = token_sum([completion for _, completion in rows])
    beta = changes.get("beta", [0.3])[0]
    expected = paper_gradient(rows, rewards, beta, changes.get("loss_type", "sigmoid"))
    assert relative(step_direction(make(tmp_path, **changes)), expected) < 5e-6


def test_pairs_stay_together_when_memory_runs_out(tmp_path):
    """Three pairs are halved to one pair, not to three rows."""
    trainer = make(tmp_path, per_device_train_batch_size=3, data=dataset(runs.PROMPTS[:3]))
    compute, sizes = trainer.compute_loss, []

    def failing(model, rows, *args, **kwargs):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("for the test")
        return compute(model, rows, *args, **kwargs)

    trainer.compute_loss = failing
    rows = runs.rows_of(runs.PROMPTS[:3], 2)
    rewards = token_sum([completion for _, completion in rows])
    assert relative(step_direction(trainer), paper_gradient(rows, rewards)) < 5e-6
    assert sizes == [6, 2, 2, 2]


def test_ties_prefer_the_first_and_unscored_pairs_do_not_train(tmp_path):
    def some(completion_ids, **kwargs):
        return [1.0, 1.0, None, 2.0, *token_sum(completion_ids[4:])]

    trainer = make(tmp_path, reward=some, reward_dry_run=False)
    rows = runs.rows_of(runs.PROMPTS, 2)
    rewards = [1.0, 1.0, None, 2.0, *token_sum([completion for _, completion in rows[4:]])]
    assert relative(step_direction(trainer), paper_gradient(rows, rewards)) < 5e-6
    with torch.no_grad():
        logps = [runs.completion_logps(tiny_model(), *row, TEMPERATURE).sum() for row in rows]
    logged = trainer.state.log_history[0]
    assert logged["objective/entropy"] == pytest.approx(-float(sum(logps)) / 8, abs=2e-4)


def test_cut_completions_cost_the_penalty(tmp_path):
    def cut(ids, place):
        return [20 + place] * 9 if place == 0 else runs.script(ids, place)

    better = {"reward": lambda completions, **kwargs: [1.0, 0.5] * (len(completions) // 2)}
    chosen = {}
    for penalty in (None, 0.7):
        trainer = make(tmp_path / str(penalty), script=cut, missing_eos_penalty=penalty, **better)
        trainer.train()
        chosen[penalty] = [r["advantage"] for r in records(tmp_path / str(penalty))]
        logged = trainer.state.log_history[0]
        assert logged["val/contain_eos_token"] == 0.5
        assert logged["objective/scores"] == pytest.approx(0.75 - (penalty or 0) / 2)
    assert chosen == {None: [1.0, -1.0] * 4, 0.7: [-1.0, 1.0] * 4}


def test_metrics_are_of_marked_tokens(tmp_path):
    trainer = make(tmp_path)
    model, reference = tiny_model(), tiny_model(seed=1)
    trainer.train()
    rows = runs.rows_of(runs.PROMPTS, 2)
    rewards = torch.tensor(token_sum([completion for _, completion in rows])).view(-1, 2)
    with torch.no_grad():
        ours, theirs = (
            torch.stack([runs.completion_logps(m, *row, TEMPERATURE).sum() for row in rows]).view(
                -1, 2
            )
            for m in (model, reference)
        )
    order = (rewards[:, 1] > rewards[:, 0]).long()[:, None]
    order = torch.cat([order, 1 - order], 1)
    logps, implied = ours.gather(1, order), 0.3 * (ours - theirs).gather(1, order)
    margins = implied[:, 0] - implied[:, 1]
    expected = {
        "objective/kl": (ours - theirs).mean(),
        "objective/entropy": -ours.mean(),
        "objective/non_score_reward": -implied.mean(),
        "objective/rlhf_reward": rewards.mean() - implied.mean(),
        "objective/scores": rewards.mean(),
        "objective/scores_margin": (rewards[:, 0] - rewards[:, 1]).abs().mean(),
        "rewards/chosen": implied[:, 0].mean(),
        "rewards/rejected": implied[:, 1].mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).float().mean(),
        "logps/chosen": logps[:, 0].mean(),
        "logps/rejected": logps[:, 1].mean(),
        "val/contain_eos_token": 1.0,
        "beta": 0.3,
        "loss": -margins.sigmoid().log().mean(),
    }
    logged = trainer.state.log_history[0]
    assert {name: logged[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=2e-4
    )


def test_each_epoch_has_its_beta(tmp_path):
    trainer = make(tmp_path, beta=[0.5, 0.25], max_steps=-1, num_train_epochs=3)
    trainer.train()
    logged = [entry["beta"] for entry in trainer.state.log_history if "beta" in entry]
    assert logged == [0.5, 0.25, 0.25]


def test_evaluation_scores_pairs(tmp_path):
    trainer = make(tmp_path, eval_dataset=dataset(), per_device_eval_batch_size=3)
    found = trainer.evaluate()
    assert found["eval_objective/kl"] != 0.0 and found["eval_loss"] > 0.0
    assert [r["group"] for r in records(tmp_path, "eval")] == [0, 0, 1, 1, 2, 2, 0, 0]


class Judge:
    """Prefers the completion with more text, and cannot decide on equal ones."""

    def judge(self, prompts, completions):
        lengths = [[len(text) for text in pair] for pair in completions]
        return [-1 if a == b else int(b > a) for a, b in lengths]


def test_a_judge_takes_the_place_of_rewards(tmp_path):
    trainer = make(tmp_path, reward=None, judge=Judge())
    trainer.train()
    found = records(tmp_path)
    sizes = [len(record["completion"]) for record in found]
    for first, second in zip(range(0, 8, 2), range(1, 8, 2), strict=True):
        sign = (sizes[first] > sizes[second]) - (sizes[first] < sizes[second])
        assert [found[first]["advantage"], found[second]["advantage"]] == [sign, -sign]
    assert len({r["reward"] for r in found}) > 1
    with pytest.raises(ValueError, match="Both a judge and reward_funcs"):
        make(tmp_path, judge=Judge())


def test_resumed_runs_end_with_the_same_weights(tmp_path):
    straight, resumed = runs.left_alone_and_resumed(tmp_path, make)
    assert torch.equal(runs.weights(straight.model), runs.weights(resumed.model))


def test_an_adapter_is_trained_against_the_base_model(tmp_path):
    from peft import LoraConfig

    torch.manual_seed(0)
    adapter = LoraConfig(r=2, target_modules=["v_proj"])
    trainer = make(tmp_path, ref_model=None, peft_config=adapter, max_steps=2)
    trainer.train()
    logged = [entry["objective/kl"] for entry in trainer.state.log_history if "beta" in entry]
    assert logged[0] == 0.0 and logged[1] != 0.0


def test_options_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model()
    model.config._name_or_path = "some/tiny"
    data, tokenizer = dataset("abcdefgh"), tiny_tokenizer()
    trainer = OnlineDPOTrainer(
        model, None, token_sum, train_dataset=data, processing_class=tokenizer
    )
    assert trainer.args.output_dir == "tiny-OnlineDPO" and trainer.args.beta == 0.1


def test_the_policy_is_no_reference_of_its_own(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="ref_model is the model that is trained"):
        make(tmp_path, model=model, ref_model=model)


def test_old_arguments(tmp_path):
    with pytest.warns(FutureWarning, match="reward_model is now reward_funcs"):
        trainer = OnlineDPOTrainer(
            model=tiny_model(),
            reward_model=token_sum,
            args=OnlineDPOConfig(str(tmp_path), use_cpu=True, report_to="none", num_generations=2),
            train_dataset=dataset(runs.PROMPTS * 2),
            processing_class=tiny_tokenizer(),
        )
    assert trainer.rewards.sources[0].name == "token_sum"


def test_chunks_never_divide_a_pair(tmp_path):
    """At most 12 tokens would cut the second pair in two."""
    whole = step_direction(make(tmp_path / "whole", max_tokens_per_piece=0))
    chunked = step_direction(make(tmp_path / "chunked", max_tokens_per_piece=12))
    assert relative(chunked, whole) < 2e-6
