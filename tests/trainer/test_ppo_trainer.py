"""Whole PPO steps against loops over tokens."""

import online_runs as runs
import pytest
import torch
from online_runs import dataset, make_trainer, records, relative, step_direction, token_sum
from ppo_runs import ONE_PASS, make, tiny_loop
from reward_runs import classifier
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3ForSequenceClassification,
)

from trl.batch import with_totals
from trl.models.value_model import value_reader
from trl.trainer.ppo_config import PPOConfig
from trl.trainer.ppo_trainer import PPOTrainer


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"gamma": 0.9, "lam": 0.5, "vf_coef": 0.7}, {"gamma": 0.9, "lam": 0.5, "vf_coef": 0.7}),
        ({"kl_estimator": "k3"}, {"kl_estimator": "k3"}),
        ({"whiten_rewards": True}, {"whiten_rewards": True}),
        ({"entropy_coef": 0.3}, {"entropy_coef": 0.3}),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, {}),
        ({"shared_prefix": False, "logits_chunk_size": 0}, {}),
        ({"values": True, "vf_coef": 0.7}, {"values": True, "vf_coef": 0.7}),
        ({"beta": 0.0, "ref_model": None}, {"beta": 0.0}),
    ],
)
def test_one_step_is_that_of_the_loop(tmp_path, changes, options):
    loop = tiny_loop(**options)
    expected = loop.gradient(loop.credit())
    assert relative(step_direction(make(tmp_path, **changes)), expected) < 2e-5


def test_gradients_are_clipped(tmp_path):
    found = step_direction(make(tmp_path, max_grad_norm=0.01)).norm()
    assert float(found) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("disabled", [True, False])
def test_dropout_of_a_value_model(tmp_path, disabled):
    values = classifier()
    values.dropout = torch.nn.Dropout(0.5)
    make_trainer(tmp_path, PPOTrainer, **ONE_PASS, value_model=values, disable_dropout=disabled)
    assert values.dropout.p == (0.0 if disabled else 0.5)


def test_values_share_prompts_with_another_model(tmp_path):
    trainer = make(tmp_path, values=True)
    assert value_reader(trainer.model).can_pack
    trainer.model.value_model.config._attn_implementation = "flex_attention"
    assert not value_reader(trainer.model).can_pack
    other = Qwen3ForSequenceClassification(tiny_model("qwen3", num_labels=1).config)
    trainer = make_trainer(tmp_path, PPOTrainer, **ONE_PASS, value_model=other)
    assert not value_reader(trainer.model).can_pack, "its layout was not compared"


def test_later_steps_use_what_the_rollout_kept(tmp_path):
    """Two passes of two mini-batches: the second pass has ratios, and old values are kept."""
    changes = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_train_batch_size": 2}
    trainer = make(tmp_path, **changes, max_steps=4, learning_rate=0.02)
    trainer.train()
    loop = tiny_loop()
    credit, tokens = loop.credit(), [len(completion) for _, completion in loop.rows]
    for pair in ([0, 1], [2, 3]) * 2:
        share = sum(tokens[i] for i in pair) / (sum(tokens) / 2)  # of the mean number of tokens
        runs.descend(loop.model, loop.gradient(credit, pair) * share, 0.02)
    assert (runs.weights(trainer.model) - runs.weights(loop.model)).abs().max() < 2e-6
    assert len({record["step"] for record in records(tmp_path)}) == 1
    logged = [entry for entry in trainer.state.log_history if "policy/approxkl_avg" in entry]
    assert [entry["policy/approxkl_avg"] > 0 for entry in logged] == [False, True, True, True]


def test_a_policy_that_moved_far_generates_anew(tmp_path):
    changes = {"num_ppo_epochs": 3, "max_steps": 6, "learning_rate": 0.5}
    free = make(tmp_path / "all", **changes)
    free.train()
    moved = [log.get("policy/approxkl_avg", 0.0) for log in free.state.log_history]
    make(tmp_path / "stopped", **changes, target_kl=1e-9).train()
    make(tmp_path / "near", **changes, target_kl=2 * max(moved)).train()
    # Evaluations in between, in which nothing has moved, do not count.
    between = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset()}
    just = make(tmp_path / "just", **changes, **between, target_kl=0.7 * moved[1])
    just.train()
    runs_of = ("all", "stopped", "near", "just")
    steps = [sorted({r["step"] for r in records(tmp_path / x)}) for x in runs_of]
    assert steps[:3] == [[0, 3], [0, 2, 3, 5], [0, 3]] and 2 in steps[3]
    stops = [log.get("policy/early_stops") for log in just.state.log_history if "loss" in log]
    assert stops[1] == 1.0, "evaluations are counted as updates that did not stop"


def test_values_and_rewards_are_of_two_models(tmp_path):
    """Rewards would change while values are trained."""
    model = classifier()
    with pytest.raises(ValueError, match="value_model also gives rewards"):
        make_trainer(tmp_path, PPOTrainer, reward=[model], **ONE_PASS, value_model=model)


def test_a_value_model_is_loaded_by_name(tmp_path):
    classifier(seed=5).save_pretrained(tmp_path / "model")
    trainer = make_trainer(tmp_path, PPOTrainer, **ONE_PASS, value_model=str(tmp_path / "model"))
    assert torch.equal(runs.weights(trainer.model.value_model), runs.weights(classifier(seed=5)))


@pytest.mark.parametrize("whiten", [False, True])
def test_unscorable_rows_do_not_train(tmp_path, whiten):
    def some(completion_ids, **kwargs):
        return [None if i == 1 else r for i, r in enumerate(token_sum(completion_ids))]

    trainer = make(tmp_path, reward=some, reward_dry_run=False, whiten_rewards=whiten)
    batch = trainer.collect([{"prompt": prompt} for prompt in runs.PROMPTS])
    advantages = batch.columns["advantages"]
    assert advantages[1].abs().max() == 0.0
    assert (advantages != 0)[0].any() and advantages.isfinite().all()
    (batch,) = with_totals([batch], trainer.ranks)
    trainer.compute_loss(trainer.model, batch.select([1])).backward()
    assert max(float(p.grad.abs().max()) for p in trainer.model.parameters()) == 0.0


def test_metrics(tmp_path):
    """One completion is cut off, and one ends with a token that only the model takes for an end."""

    def cut(ids, place):
        return {1: [20] * 9, 4: [20, 9]}.get(len(ids)) or runs.script(ids, place)

    model = tiny_model()
    model.generation_config.eos_token_id = [1, 9]
    options = {"missing_eos_penalty": 0.5, "entropy_coef": 0.01}
    trainer = make(tmp_path, model=model, script=cut, **options)
    trainer.train()
    loop, logged = tiny_loop(), trainer.state.log_history[0]
    loop.rows = runs.rows_of(runs.PROMPTS, 1, lambda ids, place: cut(ids, place)[:8])
    rewards = torch.tensor(token_sum([completion for _, completion in loop.rows]))
    ended = torch.tensor([completion[-1] in (1, 9) for _, completion in loop.rows])
    rewards = rewards - 0.5 * ~ended
    kl, entropy, of_tokens = [], [], []
    for row in loop.rows:
        with torch.no_grad():
            ours, spread, _ = loop.read(loop.model, *row)
            theirs = loop.read(loop.reference, *row)[0]
        of_tokens.append(spread)
        kl.append((ours - theirs).sum())
        entropy.append(-ours.sum())
    kl, entropy = torch.stack(kl).mean(), torch.stack(entropy).mean()
    bonus = float(torch.cat(of_tokens).mean())
    expected = {
        "objective/kl": kl,
        "objective/entropy": entropy,
        "objective/scores": rewards.mean(),
        "objective/non_score_reward": -0.2 * kl,
        "objective/rlhf_reward": rewards.mean() - 0.2 * kl,
        "val/num_eos_tokens": ended.sum(),
        "episode": 4,
        "val/ratio": 1.0,
        "val/ratio_var": 0.0,
        "policy/clipfrac_avg": 0.0,
        "policy/entropy_avg": bonus,
        "loss": logged["loss/policy_avg"] + 0.1 * logged["loss/value_avg"] - 0.01 * bonus,
    }
    assert 0 < ended.sum() < 4
    assert "frac_reward_zero_std" not in logged, "no completion has siblings"
    assert {name: logged[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=2e-4
    )


@pytest.mark.parametrize("values", [False, True])
def test_the_value_model_is_kept_beside_the_policy(tmp_path, values):
    options = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_train_batch_size": 1}
    straight, resumed = runs.left_alone_and_resumed(tmp_path, make, values=values, **options)
    assert torch.equal(runs.weights(straight.model), runs.weights(resumed.model))
    resumed.save_model()
    _, info = LlamaForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"])
    kept = load_file(tmp_path / "again" / "value_model" / "model.safetensors")
    trained = resumed.model.value_model.state_dict()
    assert kept.keys() == trained.keys()
    assert all(torch.equal(kept[name], trained[name]) for name in kept)
    if values:
        LlamaForSequenceClassification.from_pretrained(tmp_path / "again" / "value_model")


def test_an_adapter_is_trained_with_its_values(tmp_path):
    from peft import LoraConfig

    options = {"ref_model": None, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    options["script"] = None  # so that the engine reports log-probabilities, which hold no values
    adapter = {"peft_config": LoraConfig(r=2, target_modules=["v_proj"])}
    trainer = make_trainer(tmp_path, PPOTrainer, beta=0.1, **ONE_PASS, **options, **adapter)
    trainer.train()
    values = trainer.model.get_base_model().value_model
    assert values.weight.abs().max() > 0.0
    again = make_trainer(tmp_path, PPOTrainer, beta=0.1, **ONE_PASS, **options, **adapter)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(again.model.get_base_model().value_model.weight, values.weight)


def test_evaluation(tmp_path):
    trainer = make(tmp_path, eval_dataset=dataset(), per_device_eval_batch_size=2)
    found = trainer.evaluate()
    assert found["eval_objective/kl"] != 0.0 and found["eval_policy/approxkl_avg"] == 0.0


def test_old_names(tmp_path):
    with pytest.warns(FutureWarning, match="kl_coef is now beta") as caught:
        args = PPOConfig(
            *(str(tmp_path),),
            **{"use_cpu": True, "report_to": "none", "response_length": 8, "kl_coef": 0.1},
            **{"cliprange": 0.3, "total_episodes": 64, "stop_token": "eos"},
            local_rollout_forward_batch_size=4,
        )
    assert (args.max_completion_length, args.beta, args.epsilon) == (8, 0.1, 0.3)
    assert args.max_steps == 32, "eight episodes a round, four steps of each"
    assert len([w for w in caught if w.category is FutureWarning]) == 1
    with pytest.warns(FutureWarning, match="reward_model is now reward_funcs"):
        PPOTrainer(
            model=tiny_model(),
            reward_model=token_sum,
            args=args,
            train_dataset=dataset(runs.PROMPTS * 2),
            processing_class=tiny_tokenizer(),
        )
