"""Whole RLOO steps against a loop written from the paper."""

import json

import pytest
import torch
from online_runs import (
    EOS,
    PROMPTS,
    completion_logps,
    config,
    dataset,
    descend,
    gradients,
    make_trainer,
    relative,
    rows_of,
    script,
    step_direction,
    token_sum,
)
from tiny import tiny_model, tiny_tokenizer

from trl.batch import with_totals
from trl.trainer.rloo_trainer import RLOOTrainer


def paper_gradient(
    model, rows, rewards, group_size, *, reference=None, beta=0.0, clip=None, whiten=False
):
    """REINFORCE leave-one-out, one completion at a time (arXiv 2402.14740, section 3)."""
    shaped = []
    for (prompt, completion), reward in zip(rows, rewards, strict=True):
        if clip is not None:
            reward = min(max(reward, clip[0]), clip[1])
        if beta:
            with torch.no_grad():
                ours = completion_logps(model, prompt, completion)
                theirs = completion_logps(reference, prompt, completion)
            reward = reward - beta * float((ours - theirs).sum())
        shaped.append(reward)
    advantages = []
    for i, reward in enumerate(shaped):
        start = i // group_size * group_size
        others = [shaped[j] for j in range(start, start + group_size) if j != i]
        advantages.append(reward - sum(others) / len(others))
    if whiten:
        values = torch.tensor(advantages)
        advantages = ((values - values.mean()) / (values.std() + 1e-4)).tolist()
    model.zero_grad()
    for (prompt, completion), advantage in zip(rows, advantages, strict=True):
        logps = completion_logps(model, prompt, completion)
        (-advantage * logps.sum() / len(rows)).backward()
    return gradients(model)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward_clip_range": (0.5, 2.0)},
        {"normalize_advantages": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    ],
)
def test_one_step_is_the_papers(tmp_path, changes):
    rows = rows_of(PROMPTS[:2], 4)
    rewards = token_sum([completion for _, completion in rows])
    expected = paper_gradient(
        tiny_model(),
        rows,
        rewards,
        4,
        clip=changes.get("reward_clip_range"),
        whiten=changes.get("normalize_advantages", False),
    )
    assert relative(step_direction(make_trainer(tmp_path, **changes)), expected) < 5e-6


def test_kl_penalty_is_in_the_reward(tmp_path):
    """The reference is moved away after construction, so that the penalty is not zero."""
    trainer = make_trainer(tmp_path, beta=0.3)
    with torch.no_grad():
        for parameter in trainer.reference.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    rows = rows_of(PROMPTS[:2], 4)
    rewards = token_sum([completion for _, completion in rows])
    model = tiny_model()
    expected = paper_gradient(model, rows, rewards, 4, reference=trainer.reference.model, beta=0.3)
    with torch.no_grad():
        gaps = [
            completion_logps(model, *row) - completion_logps(trainer.reference.model, *row)
            for row in rows
        ]
    assert relative(step_direction(trainer), expected) < 5e-6
    logged = next(entry for entry in trainer.state.log_history if "kl" in entry)
    assert logged["kl"] == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-6)
    assert logged["reward"] == pytest.approx(sum(rewards) / 8, abs=1e-6), "unpenalized"


@pytest.mark.parametrize("fp32_head", [False, True])
def test_kl_is_exactly_zero_before_the_first_update(tmp_path, fp32_head):
    trainer = make_trainer(tmp_path, beta=0.1, cast_lm_head_to_fp32=fp32_head)
    trainer.train()
    assert next(e["kl"] for e in trainer.state.log_history if "kl" in e) == 0.0


def test_ratio_is_one_on_policy_and_clips_off_policy(tmp_path):
    settings = {"num_iterations": 3, "max_steps": 3, "epsilon": 0.01, "learning_rate": 0.5}
    trainer = make_trainer(tmp_path, **settings)
    trainer.train()
    logged = [e for e in trainer.state.log_history if "clip_ratio/region_mean" in e]
    assert logged[0]["clip_ratio/region_mean"] == 0.0
    assert logged[2]["clip_ratio/region_mean"] > 0.0
    assert [call.seeds is not None for call in trainer.backend.calls] == [True], "one round"


def test_second_pass_uses_the_old_policy(tmp_path):
    """Two passes over one round: the second gradient has ratio pi / pi_old, by hand."""
    trainer = make_trainer(
        tmp_path, num_iterations=2, max_steps=2, epsilon=10.0, learning_rate=0.01
    )
    start = tiny_model()
    trainer.train()
    rows = rows_of(PROMPTS[:2], 4)
    rewards = token_sum([completion for _, completion in rows])
    first = paper_gradient(start, rows, rewards, 4)
    moved = tiny_model()
    descend(moved, first, 0.01)
    moved.zero_grad()
    mean = [sum(rewards[:4]) / 4] * 4 + [sum(rewards[4:]) / 4] * 4
    for (prompt, completion), reward, average in zip(rows, rewards, mean, strict=True):
        with torch.no_grad():
            old = completion_logps(start, prompt, completion)
        ratio = (completion_logps(moved, prompt, completion) - old).sum().exp()
        (-ratio * 4 / 3 * (reward - average) / 8).backward()
    descend(moved, gradients(moved), 0.01)
    ours = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    theirs = torch.cat([p.detach().flatten() for p in moved.parameters()])
    assert (ours - theirs).abs().max() < 1e-6


def test_truncated_rows_leave_loss_and_baseline(tmp_path):
    def cut(ids, place):
        return [20 + place] * 9 if place == 1 else script(ids, place)

    trainer = make_trainer(tmp_path, script=cut, mask_truncated_completions=True)
    direction = step_direction(trainer)
    rows = rows_of(PROMPTS[:2], 4, cut)
    rewards = token_sum([completion for _, completion in rows])
    kept = [i for i in range(8) if i % 4 != 1]
    expected = paper_gradient(tiny_model(), [rows[i] for i in kept], [rewards[i] for i in kept], 3)
    assert relative(direction, expected) < 5e-6


def test_unscorable_rows_leave_baseline_but_not_the_denominator(tmp_path):
    def sometimes(completion_ids, **kwargs):
        return [None if i % 4 == 2 else r for i, r in enumerate(token_sum(completion_ids))]

    direction = step_direction(make_trainer(tmp_path, reward=sometimes))
    rows = rows_of(PROMPTS[:2], 4)
    rewards = token_sum([completion for _, completion in rows])
    kept = [i for i in range(8) if i % 4 != 2]
    expected = paper_gradient(tiny_model(), [rows[i] for i in kept], [rewards[i] for i in kept], 3)
    assert relative(direction, expected * 6 / 8) < 5e-6


def test_equal_rewards_leave_the_weights_alone(tmp_path):
    trainer = make_trainer(tmp_path, reward=lambda completions, **kwargs: [1.0] * len(completions))
    assert step_direction(trainer).abs().max() == 0.0
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0


def test_zero_std_is_measured_on_the_task_reward(tmp_path):
    trainer = make_trainer(
        tmp_path,
        beta=0.5,
        reward=lambda completions, **kwargs: [1.0] * len(completions),
    )
    with torch.no_grad():
        next(trainer.reference.model.parameters()).add_(0.1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] != 0.0
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0


def test_completions_are_written_with_their_credit(tmp_path):
    make_trainer(tmp_path).train()
    lines = (tmp_path / "completions" / "train.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rows = rows_of(PROMPTS[:2], 4)
    assert [r["completion_ids"] for r in records] == [completion for _, completion in rows]
    assert [r["group"] for r in records] == [0] * 4 + [1] * 4
    assert {r["finish"] for r in records} == {"stop"} and {r["step"] for r in records} == {0}
    for group in (records[:4], records[4:]):
        rewards = [r["reward"] for r in group]
        assert rewards == pytest.approx(token_sum([r["completion_ids"] for r in group]))
        for record in group:
            others = (sum(rewards) - record["reward"]) / 3
            assert record["advantage"] == pytest.approx(record["reward"] - others, abs=1e-6)
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-5)


def test_old_trainer_arguments(tmp_path):
    with pytest.warns(FutureWarning, match="policy is now model; ref_policy has no effect"):
        trainer = RLOOTrainer(
            policy=tiny_model(),
            ref_policy=tiny_model(),
            reward_funcs=token_sum,
            args=config(tmp_path),
            train_dataset=dataset(),
            processing_class=tiny_tokenizer(),
        )
    assert trainer.processing_class.eos_token_id == EOS
    with pytest.raises(ValueError, match="both policy and model"):
        RLOOTrainer(tiny_model(), token_sum, policy=tiny_model())
    with pytest.raises(TypeError, match="nonsense"):
        RLOOTrainer(tiny_model(), token_sum, nonsense=1)


def test_rows_without_advantage_have_no_gradient_at_all(tmp_path):
    """Each adds exactly 0, so dropping them changes no bit; the denominator still counts them."""

    def in_two_groups(completion_ids, **kwargs):
        return [1.0] * 4 + [(sum(ids) % 13) / 3 for ids in completion_ids[4:]]

    trainer = make_trainer(tmp_path, reward=in_two_groups)
    batch = trainer.collect([{"prompt": prompt} for prompt in PROMPTS[:2] for _ in range(4)])
    assert batch.columns["advantages"][:4].abs().max() == 0.0
    assert batch.columns["advantages"][4:].abs().min() > 0.0
    (batch,) = with_totals([batch], trainer.ranks)
    trainer.model.train()
    found = {}
    for name, rows in {"all": range(8), "without": range(4), "with": range(4, 8)}.items():
        trainer.model.zero_grad()
        for row in rows:
            trainer.compute_loss(trainer.model, batch.select([row])).backward()
        found[name] = gradients(trainer.model)
    assert found["without"].abs().max() == 0.0
    assert torch.equal(found["all"], found["with"])
