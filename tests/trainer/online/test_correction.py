"""What the mismatch of trainer and engine does to whole updates, against slow formulas."""

import dataclasses
import json
import math

import pytest
import torch
from online_runs import (
    EOS,
    ReportingBackend,
    completion_logps,
    dataset,
    make_trainer,
    relative,
    rows_of,
    step_direction,
)
from tiny import tiny_model

from trl.ops.logit_statistics import Support
from trl.ops.policy_losses import MODES
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.online.correction import MismatchError
from trl.trainer.rloo_trainer import RLOOTrainer

TWO = ["ab", "cde"]
FILTERS = {"top_p": 0.8, "top_k": 20, "min_p": 0.005, "temperature": 0.7}
LOW, HIGH = 0.7, 1.5
RATIO, GAP = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"


def off(row, place):
    """Between -0.6 and 0.6 nats."""
    return 0.2 * ((3 * row + 2 * place) % 7 - 3)


def longer(ids, place):
    """Completions of 2, 4, 6 and 8 tokens."""
    return [10 + (7 * place + 3 * i + ids[0]) % 60 for i in range(1 + 2 * place)] + [EOS]


def trainer_of(folder, kind=RLOOTrainer, off=off, backend=ReportingBackend, **changes):
    model = tiny_model().double()
    settings = {"model": model, "data": dataset(TWO), "skip_zero_advantages": False} | changes
    trainer = make_trainer(folder, kind, **settings)
    trainer.backend = backend(model, off, longer)
    return trainer


def logged(trainer, prefix="sampling/"):
    entry = next(e for e in trainer.state.log_history if "loss" in e)
    return {name: value for name, value in entry.items() if name.startswith(prefix)}


def bounded(ratio, mode):
    if LOW <= ratio <= HIGH:
        return ratio
    return 0.0 if mode.endswith("mask") else min(max(ratio, LOW), HIGH)


def slow_weights(mode):
    """Weights of the tokens of each row: the trainer's log-probabilities are `off` lower."""
    rows = []
    for row, (_, ids) in enumerate(rows_of(TWO, 4, longer)):
        differences = [-off(row, place) for place in range(len(ids))]
        if mode.startswith("sequence"):
            differences = [sum(differences)] * len(ids)
        rows.append([bounded(math.exp(x), mode) for x in differences])
    return rows


def slow_gradient(folder, weights, kind, temperature=1.0):
    """Of minus the mean of w A log pi, over completions (RLOO) or tokens (DAPO)."""
    lines = (folder / "completions" / "train.jsonl").read_text().splitlines()
    advantages = [json.loads(line)["advantage"] for line in lines]
    model, rows = tiny_model().double(), rows_of(TWO, 4, longer)
    loss = 0.0
    for (prompt, ids), advantage, of_row in zip(rows, advantages, weights, strict=True):
        logps = completion_logps(model, prompt, ids, temperature)
        loss = loss - advantage * (torch.tensor(of_row, dtype=torch.float64) * logps).sum()
    count = len(rows) if kind is RLOOTrainer else sum(len(ids) for _, ids in rows)
    (loss / count).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def bounds(mode):
    names = {"mode": mode, "clip_min": LOW, "clip_max": HIGH}
    return {f"vllm_importance_sampling_{name}": value for name, value in names.items()}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((RLOOTrainer, mode) for mode in MODES),
        (GRPOTrainer, "token_truncate"),
        (GRPOTrainer, "sequence_mask"),
    ],
)
def test_the_gradient_is_that_of_the_slow_formula(tmp_path, kind, mode):
    """With all filters, which are replayed."""
    trainer = trainer_of(tmp_path, kind, **bounds(mode), **FILTERS)
    found, weights = step_direction(trainer), slow_weights(mode)
    plain = slow_gradient(tmp_path, [[1.0] * len(row) for row in weights], kind, 0.7)
    assert relative(found, slow_gradient(tmp_path, weights, kind, 0.7)) < 1e-5
    assert relative(found, plain) > 0.1
    changed = [w for row in weights for w in row if w in (0.0, LOW, HIGH)]
    assert 0 < len(changed) < sum(map(len, weights))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (RLOOTrainer, {"num_iterations": 2}),
        (GRPOTrainer, {"num_iterations": 2, "logits_chunk_size": 200}),
        (RLOOTrainer, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
        (GRPOTrainer, {"skip_zero_advantages": True, "logits_chunk_size": 0}),
    ],
)
def test_plans_and_savings_change_nothing(tmp_path, kind, changes):
    """Off-policy the same weights come from the pass that scores old log-probabilities."""
    trainer = trainer_of(tmp_path, kind, **bounds("token_mask"), **(FILTERS | changes))
    found = step_direction(trainer)
    expected = slow_gradient(tmp_path, slow_weights("token_mask"), kind, 0.7)
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "mode"), [(RLOOTrainer, "token_truncate"), (GRPOTrainer, "sequence_mask")]
)
def test_a_ratio_of_one_changes_nothing(tmp_path, kind, mode):
    def gradient(name, **changes):
        return step_direction(trainer_of(tmp_path / name, kind, lambda *args: 0.0, **changes))

    plain = gradient("off", vllm_importance_sampling_correction=False)
    assert plain.norm() > 0.01
    assert relative(gradient("on", **bounds(mode)), plain) < 1e-6


@pytest.mark.parametrize(
    ("kind", "mode"), [(RLOOTrainer, "token_mask"), (GRPOTrainer, "sequence_mask")]
)
def test_what_is_masked_has_no_gradient(tmp_path, kind, mode):
    trainer = trainer_of(tmp_path, kind, lambda *args: 3.0, **bounds(mode))
    assert step_direction(trainer).abs().max() == 0.0
    assert logged(trainer)["sampling/frac_out_of_bounds"] == 1.0


def equal(prompts, **kwargs):
    """The same reward for all."""
    return [1.0] * len(prompts)


def test_the_penalty_in_the_loss_is_not_weighted(tmp_path):
    """All rows are masked in one run; in the other none has an advantage."""
    found = []
    for name, gap, reward in (("masked", 3.0, None), ("equal", 0.0, equal)):
        changes = {"beta": 0.5} | ({} if reward is None else {"reward": reward})
        options = bounds("sequence_mask") | changes
        trainer = trainer_of(tmp_path / name, GRPOTrainer, lambda *args, x=gap: x, **options)
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in trainer.reference.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
        found.append(step_direction(trainer))
    assert found[1].norm() > 0.01 and relative(*found) < 1e-6


class OneTurn(ReportingBackend):
    """The policy did not write every second token; what is reported of these is no number."""

    def generate(self, *args):
        found = super().generate(*args)
        wrote = [[place % 2 == 0 for place in range(len(ids))] for ids in found.completion_ids]
        logps = [
            [logp if own else math.nan for logp, own in zip(*row, strict=True)]
            for row in zip(found.sampling_logps, wrote, strict=True)
        ]
        return dataclasses.replace(found, policy_mask=wrote, sampling_logps=logps)


def test_tokens_that_the_policy_did_not_write_do_not_count(tmp_path):
    trainer = trainer_of(tmp_path, GRPOTrainer, lambda row, place: 0.3 - place % 2, backend=OneTurn)
    assert step_direction(trainer).isfinite().all()
    found = logged(trainer)
    longest = max(len(ids[::2]) for _, ids in rows_of(TWO, 4, longer))
    assert [found[f"{GAP}/mean"], found[f"{GAP}/max"]] == pytest.approx([0.3, 0.3], abs=1e-5)
    assert found[f"{RATIO}/min"] == pytest.approx(math.exp(-0.3 * longest), rel=1e-5)


# --- Metrics ---


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (RLOOTrainer, {"vllm_importance_sampling_correction": False}),
        (GRPOTrainer, {"num_iterations": 2}),
    ],
)
def test_metrics_by_value(tmp_path, kind, changes):
    trainer = trainer_of(tmp_path, kind, **bounds("token_truncate"), **(FILTERS | changes))
    trainer.train()
    rows = rows_of(TWO, 4, longer)
    offs = [off(row, place) for row, (_, ids) in enumerate(rows) for place in range(len(ids))]
    ratios = [math.exp(-x) for x in offs]
    support = Support(0.8, 20, 0.005)
    gaps, masses = [], []
    for row, (prompt, ids) in enumerate(rows):
        logits = tiny_model().double()(torch.tensor([prompt + ids])).logits[0].detach() / 0.7
        found = support.compute(logits[len(prompt) - 1 : -1], torch.tensor(ids))
        masses += found.exp().tolist()
        gaps += [abs(m - off(row, place)) for place, m in enumerate(found.tolist())]

    def mean(values):
        return sum(values) / len(values)

    assert logged(trainer) == {
        f"{GAP}/mean": pytest.approx(mean(gaps), abs=1e-5),
        f"{GAP}/max": pytest.approx(max(gaps), abs=1e-5),
        "sampling/replayed_logp_difference/mean": pytest.approx(mean(map_abs(offs)), abs=1e-5),
        "sampling/replayed_logp_difference/max": pytest.approx(max(map_abs(offs)), abs=1e-5),
        "sampling/kept_mass": pytest.approx(mean(masses), abs=1e-5),
        f"{RATIO}/min": pytest.approx(min(ratios), abs=1e-5),
        f"{RATIO}/mean": pytest.approx(mean(ratios), abs=1e-5),
        f"{RATIO}/max": pytest.approx(max(ratios), abs=1e-5),
        "sampling/frac_out_of_bounds": pytest.approx(
            mean([not LOW <= ratio <= HIGH for ratio in ratios]), abs=1e-6
        ),
    }


def map_abs(values):
    return [abs(value) for value in values]


def test_nothing_is_compared_where_it_is_the_policys_own(tmp_path):
    sampled = make_trainer(tmp_path / "own", script=None, top_p=0.8)
    sampled.train()
    assert not logged(sampled)


def test_on_policy_nothing_is_scored_for_it(tmp_path):
    trainer = trainer_of(tmp_path, **FILTERS)
    trainer.scorer.frozen_scores = None
    trainer.train()
    assert f"{RATIO}/mean" in logged(trainer)


# --- Vespo, whose weight is made of ratios ---


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}])
def test_vespo_takes_the_weights_into_its_ratio(tmp_path, changes):
    """-phi A log pi with log phi = lambda + k log w - lambda w, w the product of the weights."""
    settings = bounds("token_truncate") | changes
    trainer = trainer_of(tmp_path, GRPOTrainer, loss_type="vespo", **settings)
    found = step_direction(trainer)
    lines = (tmp_path / "completions" / "train.jsonl").read_text().splitlines()
    signs = [json.loads(line)["advantage"] >= 0 for line in lines]
    phis = []
    for of_row, positive in zip(slow_weights("token_truncate"), signs, strict=True):
        (k, decay), w = (2.0, 3.0) if positive else (3.0, 2.0), math.prod(of_row)
        phis.append([math.exp(decay + k * math.log(w) - decay * w)] * len(of_row))
    assert relative(found, slow_gradient(tmp_path, phis, GRPOTrainer)) < 1e-5


# --- The bound of the user ---


def test_a_gap_above_the_bound_stops_before_the_update(tmp_path):
    trainer = trainer_of(tmp_path, off=lambda *args: 0.25, vllm_max_logp_gap=0.2)
    before = trainer.model.state_dict()["lm_head.weight"].clone()
    words = r"Step 1: .* differ by 0.25 nats a token on average, more than vllm_max_logp_gap=0.2"
    with pytest.raises(MismatchError, match=words):
        trainer.train()
    assert torch.equal(trainer.model.state_dict()["lm_head.weight"], before)


def test_filters_do_not_count_towards_the_bound(tmp_path):
    trainer = trainer_of(tmp_path, off=lambda *args: 0.1, vllm_max_logp_gap=0.11, **FILTERS)
    trainer.train()
    assert logged(trainer)[f"{GAP}/mean"] > 0.15


def test_each_update_and_evaluation_is_compared_by_itself(tmp_path, caplog):
    gaps = [0.25, 0.18, 0.25]
    trainer = trainer_of(
        tmp_path,
        off=lambda *args: gaps[len(trainer.backend.calls) - 1],
        vllm_max_logp_gap=0.2,
        vllm_logp_gap_action="warn",
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_dataset=dataset(TWO),
        per_device_eval_batch_size=8,
    )
    with caplog.at_level("WARNING", "trl"):
        trainer.train()
        trainer.evaluate()
    found = [r.message for r in caplog.records if "vllm_max_logp_gap" in r.message]
    assert [words.split(":")[0] for words in found] == ["Step 1", "Step 2"]


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate"])
def test_what_the_engine_reports_as_nan_stops_training(tmp_path, mode):
    """Even where only one token is affected, and whether weights are masked or not."""
    one = {(3, 0): math.nan}
    trainer = trainer_of(tmp_path, off=lambda *at: one.get(at, 0.0), **bounds(mode))
    words = "Step 1: ratio of trainer to engine probabilities of row 3 on rank 0 is NaN"
    with pytest.raises(RuntimeError, match=words):
        trainer.train()


# --- What cannot be replayed ---


def test_without_replay_the_loss_is_not_corrected_and_that_is_said_once(tmp_path, caplog):
    penalty = {"repetition_penalty": 1.2, "max_steps": 2}
    with caplog.at_level("WARNING", "trl"):
        found = step_direction(trainer_of(tmp_path / "on", **penalty))
    said = [r.message for r in caplog.records if "cannot reproduce" in r.message]
    assert len(said) == 1 and "repetition_penalty=1.2" in said[0]
    plain = trainer_of(tmp_path / "off", vllm_importance_sampling_correction=False, **penalty)
    assert torch.equal(found, step_direction(plain))
    with pytest.raises(ValueError, match="cannot be used with repetition_penalty=1.2"):
        trainer_of(tmp_path / "bound", vllm_max_logp_gap=0.1, **penalty)


def test_what_filters_take_away_does_not_count_as_off_policy(tmp_path):
    """Without the replay each reported log-probability looks as if the policy had moved."""

    def gradient(name, **changes):
        trainer = trainer_of(tmp_path / name, GRPOTrainer, lambda *args: 0.0, **FILTERS, **changes)
        return step_direction(trainer)

    assert torch.equal(gradient("a", off_policy_mask_threshold=0.01), gradient("b"))


def test_rows_that_are_not_scored_are_not_compared(tmp_path):
    """Those of the second prompt have equal rewards, so on-policy no forward has them."""
    trainer = trainer_of(
        tmp_path,
        off=lambda row, place: 0.25 if row < 4 else 5.0,
        reward=lambda prompts, completion_ids, **kwargs: [
            len(ids) if prompt == "ab" else 1.0
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ],
        skip_zero_advantages=True,
    )
    assert step_direction(trainer).norm() > 0.01
    assert logged(trainer)[f"{GAP}/max"] == pytest.approx(0.25, abs=1e-5)
