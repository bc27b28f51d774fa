"""Whole GRPO steps against a loop over single tokens, in double precision, from the papers."""

import json
import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from online_runs import (
    PROMPTS,
    dataset,
    gradients,
    make_trainer,
    relative,
    rows_of,
    script,
    token_sum,
)
from tiny import tiny_model
from torch.nn.utils import vector_to_parameters
from transformers import TrainerCallback

from trl.algorithms.grpo import CLIPPED
from trl.generation.base import GenerationBackend, Generations, cut_at_stop
from trl.trainer.grpo_config import LOSS_TYPES
from trl.trainer.grpo_trainer import STATE_FILE, GRPOTrainer

ROWS = rows_of(PROMPTS[:2], 4)
CASES = [(kind, level) for kind in LOSS_TYPES for level in ("token", "sequence")]
CASES.remove(("vespo", "sequence"))  # its weight is one for a completion in any case
LONGEST = 8  # max_completion_length


# --- The slow side ---


def token_scores(model, prompt, completion):
    """Log-probabilities and entropies of one completion, from one unpadded forward."""
    logits = model(torch.tensor([prompt + completion])).logits[0]
    every = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return every[range(len(completion)), completion], -(every.exp() * every).sum(-1)


def credit(rewards, size=4, scale="group"):
    """Advantages; None stands for a row that could not be scored."""
    found = []
    present = [r for r in rewards if r is not None]
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        scored = [r for r in group if r is not None]
        spread = {
            "none": 1.0,
            "group": statistics.stdev(scored) + 1e-4,
            "batch": statistics.stdev(present) + 1e-4,
        }[scale]
        mean = statistics.fmean(scored)
        found += [0.0 if r is None else (r - mean) / spread for r in group]
    return found


ADVANTAGES = credit(token_sum([completion for _, completion in ROWS]))


@dataclass(frozen=True)
class Loop:
    """The loss of one micro-batch; the fields are the options of the configuration."""

    kind: str = "dapo"
    level: str = "token"
    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    corrected: bool = True
    coefficient: float = 0.0

    def objective(self, ratio, logp, advantage, phi):
        if self.kind == "cispo":
            return -min(ratio.item(), self.high) * advantage * logp
        if self.kind == "vespo":
            return -phi * advantage * logp
        if self.kind == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
        clipped = ratio
        if not 1 - self.low <= ratio <= 1 + self.high:
            clipped = ratio.new_tensor(1 - self.low if ratio < 1 else 1 + self.high)
        if self.delta is not None and ratio > self.delta:
            ratio = ratio.new_tensor(self.delta)
        return -min(ratio * advantage, clipped * advantage)

    def phi(self, differences, advantage):
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        w = math.exp(sum(differences.tolist()))
        return w**k * math.exp(decay * (1 - w))

    def loss(self, model, rows, advantages, *, old=None, reference=None, keep=None):
        tokens = sum(len(completion) for _, completion in rows)
        total, entropy = 0.0, 0.0
        for i, (prompt, completion) in enumerate(rows):
            length = len(completion)
            logps, entropies = token_scores(model, prompt, completion)
            with torch.no_grad():
                old_logps = logps if old is None else token_scores(old, prompt, completion)[0]
                old_logps = old_logps.detach().clone()
                if self.beta:
                    ref_logps = token_scores(reference, prompt, completion)[0]
            differences = logps - old_logps
            phi = self.phi(differences, advantages[i])
            denominator = {
                "grpo": len(rows) * length,
                "sapo": len(rows) * length,
                "dr_grpo": len(rows) * LONGEST,
                "luspo": len(rows),
            }.get(self.kind, tokens)
            for t in range(length):
                moved = differences[t] if self.level == "token" else differences.mean()
                ratio = moved.exp()
                loss = self.objective(ratio, logps[t], advantages[i], phi)
                if keep is not None and not keep[i][t]:
                    loss = 0.0
                if self.beta:
                    gap = ref_logps[t] - logps[t]
                    k3 = gap.exp() - gap - 1
                    loss = loss + self.beta * k3 * (ratio if self.corrected else 1.0)
                total = total + loss / denominator
            entropy = entropy + entropies.sum() / tokens
        return total - self.coefficient * entropy

    def gradient(self, model, rows=ROWS, advantages=ADVANTAGES, **others):
        model.zero_grad()
        self.loss(model, rows, advantages, **others).backward()
        return gradients(model)


def model_at(weights=None):
    """The tiny model in double precision, with its first weights or the given ones."""
    model = tiny_model().double()
    if weights is not None:
        vector_to_parameters(weights.double(), model.parameters())
    return model


# --- The fast side ---


class Recorder(TrainerCallback):
    """Keeps weights and gradient of every update; may move the policy after each of them."""

    def __init__(self, shift=False):
        self.weights, self.gradients, self.shift = [], [], shift

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.shift:
            shift_weights(model)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        flat = [p.detach().flatten() for p in model.parameters()]
        self.weights.append(torch.cat(flat).clone())
        self.gradients.append(gradients(model).clone())


def run(folder, move_reference=False, shift=False, **changes):
    """Train on scripted completions; return the recorder and the trainer."""
    recorder = Recorder(shift)
    trainer = make_trainer(folder, GRPOTrainer, callbacks=[recorder], **changes)
    if move_reference:
        shift_weights(trainer.reference.model, seed=2)
    trainer.train()
    return recorder, trainer


def second_pass(folder, **changes):
    """Train twice on one round, with ratios on both sides of 1; return also the moved policy."""
    settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.001, "shift": True}
    recorder, trainer = run(folder, **(settings | changes))
    return recorder.gradients[1], model_at(recorder.weights[1]), trainer


def shift_weights(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def split(rows_a_micro_batch):
    return {
        "per_device_train_batch_size": rows_a_micro_batch,
        "gradient_accumulation_steps": 8 // rows_a_micro_batch,
    }


# --- Every objective ---


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_one_step_on_policy(tmp_path, kind, level):
    recorder, _ = run(tmp_path, loss_type=kind, importance_sampling_level=level)
    high = 1.2 if kind == "cispo" else 0.2
    expected = Loop(kind, level, high=high).gradient(model_at())
    assert relative(recorder.gradients[0], expected) < 5e-6


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_second_pass_off_policy(tmp_path, kind, level):
    high = {"epsilon_high": 1.07 if kind == "cispo" else 0.07}
    settings = {"loss_type": kind, "importance_sampling_level": level, "epsilon": 0.05} | high
    found, moved, trainer = second_pass(tmp_path, **settings)
    loop = Loop(kind, level, low=0.05, high=high["epsilon_high"])
    expected = loop.gradient(moved, old=model_at())
    assert relative(found, expected) < 5e-6
    assert relative(loop.gradient(moved), expected) > 1e-3, "old log-probabilities matter"
    if kind in CLIPPED:
        assert logged(trainer, "clip_ratio/low_mean")[0] == 0.0
        assert logged(trainer, "clip_ratio/low_mean")[1] > 0.0
        assert logged(trainer, "clip_ratio/high_mean")[1] > 0.0


@pytest.mark.parametrize("kind", CLIPPED)
def test_delta_bounds_the_unclipped_ratio(tmp_path, kind):
    found, moved, _ = second_pass(tmp_path, loss_type=kind, delta=1.25)
    expected = Loop(kind, delta=1.25).gradient(moved, old=model_at())
    assert relative(found, expected) < 5e-6
    assert relative(Loop(kind).gradient(moved, old=model_at()), expected) > 1e-3


@pytest.mark.parametrize(("rows", "level"), [(4, "token"), (2, "sequence"), (1, "token")])
@pytest.mark.parametrize("kind", [kind for kind in LOSS_TYPES if kind != "bnpo"])
def test_the_cut_into_micro_batches_changes_nothing(tmp_path, kind, rows, level):
    """One step, against the gradient of the uncut round."""
    recorder, _ = run(tmp_path, loss_type=kind, importance_sampling_level=level, **split(rows))
    expected = Loop(kind, level, high=1.2 if kind == "cispo" else 0.2).gradient(model_at())
    assert relative(recorder.gradients[0], expected) < 5e-6


def test_bnpo_averages_the_token_means_of_its_micro_batches(tmp_path):
    recorder, _ = run(tmp_path, loss_type="bnpo", **split(2))
    parts = [slice(start, start + 2) for start in range(0, 8, 2)]
    loop, model = Loop("bnpo"), model_at()
    expected = sum(loop.gradient(model, ROWS[part], ADVANTAGES[part]) for part in parts) / 4
    assert relative(recorder.gradients[0], expected) < 5e-6
    assert relative(recorder.gradients[0], loop.gradient(model)) > 1e-3


@pytest.mark.parametrize("rows", [8, 2])
def test_penalty_and_bonus_do_not_depend_on_the_cut_either(tmp_path, rows):
    recorder, trainer = run(
        tmp_path, move_reference=True, beta=0.3, entropy_coef=0.2, **split(rows)
    )
    expected = Loop(beta=0.3, coefficient=0.2).gradient(
        model_at(), reference=trainer.reference.model.double()
    )
    assert relative(recorder.gradients[0], expected) < 5e-6


def test_a_round_that_serves_two_updates_keeps_one_denominator(tmp_path):
    """The second update sees half of the round, and divides by half of the round's tokens."""
    recorder, trainer = run(
        tmp_path,
        loss_type="dapo",
        per_device_train_batch_size=4,
        steps_per_generation=2,
        learning_rate=0.001,
        max_steps=2,
        shift=True,
    )
    moved, whole = model_at(recorder.weights[1]), Loop()
    half = slice(4, 8)
    share = sum(len(c) for _, c in ROWS[half]) / (sum(len(c) for _, c in ROWS) / 2)
    expected = share * whole.gradient(moved, ROWS[half], ADVANTAGES[half], old=model_at())
    assert relative(recorder.gradients[1], expected) < 5e-6
    assert len(trainer.backend.calls) == 1


# --- Advantages ---


@pytest.mark.parametrize(
    ("given", "scale"),
    [("group", "group"), ("batch", "batch"), ("none", "none"), (True, "group"), (False, "none")],
)
def test_scale_of_the_advantages(tmp_path, given, scale):
    recorder, _ = run(tmp_path, scale_rewards=given)
    advantages = credit(token_sum([completion for _, completion in ROWS]), scale=scale)
    expected = Loop().gradient(model_at(), advantages=advantages)
    assert relative(recorder.gradients[0], expected) < 5e-6


def length_or_nothing(completion_ids, **kwargs):
    """Scores no completion of two tokens."""
    return [None if len(ids) == 2 else float(len(ids)) for ids in completion_ids]


def test_functions_are_normalized_before_they_are_added(tmp_path):
    recorder, _ = run(
        tmp_path,
        reward=[token_sum, length_or_nothing],
        reward_weights=[0.3, 2.0],
        multi_objective_aggregation="normalize_then_sum",
        scale_rewards="none",
    )
    completions = [completion for _, completion in ROWS]
    scores = [credit(function(completions)) for function in (token_sum, length_or_nothing)]
    total = [0.3 * a + 2.0 * b for a, b in zip(*scores, strict=True)]
    mean, spread = statistics.fmean(total), statistics.stdev(total) + 1e-4
    advantages = [(x - mean) / spread for x in total]
    expected = Loop().gradient(model_at(), advantages=advantages)
    assert relative(recorder.gradients[0], expected) < 5e-6


def test_functions_are_added_before_they_are_normalized_by_default(tmp_path):
    recorder, _ = run(tmp_path, reward=[token_sum, length_or_nothing], reward_weights=[0.3, 2.0])
    completions = [completion for _, completion in ROWS]
    pairs = zip(token_sum(completions), length_or_nothing(completions), strict=True)
    expected = Loop().gradient(
        model_at(), advantages=credit([0.3 * a + 2.0 * (b or 0.0) for a, b in pairs])
    )
    assert relative(recorder.gradients[0], expected) < 5e-6


def test_unscorable_rows_leave_the_baseline_but_not_the_denominator(tmp_path):
    recorder, _ = run(tmp_path, reward=length_or_nothing)
    advantages = credit(length_or_nothing([completion for _, completion in ROWS]))
    expected = Loop().gradient(model_at(), advantages=advantages)
    assert relative(recorder.gradients[0], expected) < 5e-6


def test_equal_rewards_leave_the_weights_alone(tmp_path):
    recorder, trainer = run(tmp_path, reward=lambda completions, **kw: [0.1] * len(completions))
    assert recorder.gradients[0].abs().max() == 0.0
    assert logged(trainer, "frac_reward_zero_std") == [1.0]


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_truncated_rows_leave_loss_baseline_and_denominator(tmp_path, kind):
    def cut(ids, place):
        return [20 + place] * 9 if place == 1 else script(ids, place)

    recorder, trainer = run(
        tmp_path, loss_type=kind, script=cut, mask_truncated_completions=True, **split(4)
    )
    rows = [row for i, row in enumerate(rows_of(PROMPTS[:2], 4, cut)) if i % 4 != 1]
    advantages = credit(token_sum([completion for _, completion in rows]), size=3)
    loop, model = Loop(kind, high=1.2 if kind == "cispo" else 0.2), model_at()
    if kind == "bnpo":
        halves = slice(0, 3), slice(3, 6)
        expected = sum(loop.gradient(model, rows[x], advantages[x]) for x in halves) / 2
    else:
        expected = loop.gradient(model, rows, advantages)
    assert relative(recorder.gradients[0], expected) < 5e-6
    assert logged(trainer, "completions/clipped_ratio") == [0.25]


# --- The KL penalty ---


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("kind", "level"), [("dapo", "token"), ("grpo", "sequence")])
def test_kl_penalty_in_the_loss(tmp_path, kind, level, corrected):
    settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.001, "shift": True}
    recorder, trainer = run(
        tmp_path,
        move_reference=True,
        loss_type=kind,
        importance_sampling_level=level,
        beta=0.5,
        use_bias_correction_kl=corrected,
        **settings,
    )
    reference = trainer.reference.model.double()
    loop = Loop(kind, level, beta=0.5, corrected=corrected)
    first = loop.gradient(model_at(), reference=reference)
    assert relative(recorder.gradients[0], first) < 5e-6
    moved = model_at(recorder.weights[1])
    second = loop.gradient(moved, reference=reference, old=model_at())
    assert relative(recorder.gradients[1], second) < 5e-6
    other = replace(loop, corrected=not corrected)
    wrong = other.gradient(moved, reference=reference, old=model_at())
    assert relative(recorder.gradients[1], wrong) > 1e-3
    with torch.no_grad():
        gaps = [
            token_scores(reference, *row)[0] - token_scores(model_at(), *row)[0] for row in ROWS
        ]
    gap = torch.cat(gaps)
    expected = float((gap.exp() - gap - 1).mean())
    assert logged(trainer, "kl")[0] == pytest.approx(expected, rel=1e-4)


def test_kl_is_exactly_zero_before_the_first_update(tmp_path):
    assert logged(run(tmp_path, beta=0.1)[1], "kl") == [0.0]


# --- Which tokens count ---


def high_entropy_tokens(model, rows, share):
    with torch.no_grad():
        entropies = [token_scores(model, *row)[1].tolist() for row in rows]
    everything = sorted(x for row in entropies for x in row)
    threshold = float(np.quantile(everything, 1 - share))
    gap = min(abs(x - threshold) for x in everything)
    assert gap > 1e-6, "rounding must not decide"
    return [[x >= threshold for x in row] for row in entropies]


@pytest.mark.parametrize("kind", ["grpo", "dapo", "luspo"])
def test_only_tokens_of_high_entropy_are_trained_on(tmp_path, kind):
    """The penalty counts for all tokens, and so do the denominators."""
    recorder, trainer = run(
        tmp_path, move_reference=True, loss_type=kind, beta=0.5, top_entropy_quantile=0.4
    )
    keep = high_entropy_tokens(model_at(), ROWS, 0.4)
    assert sum(map(sum, keep)) == 8
    loop = Loop(kind, beta=0.5)
    reference = trainer.reference.model.double()
    expected = loop.gradient(model_at(), reference=reference, keep=keep)
    assert relative(recorder.gradients[0], expected) < 5e-6


CUTS = {
    "whole": {},
    "micro-batches of 2": split(2),
    "single rows": split(1),
    "chunks": {"max_tokens_per_piece": 12},
    "micro-batches in chunks": {"max_tokens_per_piece": 5} | split(4),
}


@pytest.mark.parametrize("cut", CUTS)
def test_the_entropy_threshold_is_that_of_the_round(tmp_path, cut):
    """Whatever is computed at once. Rows of zero advantage count for it, though left out."""
    recorder, trainer = run(tmp_path, top_entropy_quantile=0.2, **CUTS[cut])
    keep = high_entropy_tokens(model_at(), ROWS, 0.2)
    parts = [high_entropy_tokens(model_at(), ROWS[i : i + 2], 0.2) for i in range(0, 8, 2)]
    assert keep != [row for part in parts for row in part], "the cut would make a difference"
    assert relative(recorder.gradients[0], Loop().gradient(model_at(), keep=keep)) < 5e-6
    assert trainer.skips_zero_advantages


def test_a_second_pass_trains_on_the_same_tokens(tmp_path):
    """Those of high entropy under the policy that generated, as ratios compare with it."""
    found, moved, _ = second_pass(tmp_path, top_entropy_quantile=0.4)
    keep = high_entropy_tokens(model_at(), ROWS, 0.4)
    assert keep != high_entropy_tokens(moved, ROWS, 0.4)
    expected = Loop().gradient(moved, old=model_at(), keep=keep)
    assert relative(found, expected) < 5e-6


def test_the_loss_of_an_evaluation_is_of_tokens_of_high_entropy(tmp_path):
    options = {"top_entropy_quantile": 0.4, "per_device_eval_batch_size": 8}
    _, trainer = run(tmp_path, eval_dataset=dataset(PROMPTS[:2]), learning_rate=0.0, **options)
    keep = high_entropy_tokens(model_at(), ROWS, 0.4)
    expected = Loop().loss(model_at(), ROWS, ADVANTAGES, keep=keep)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["dapo", "vespo", "sapo"])
def test_far_completions_of_negative_advantage_are_dropped(tmp_path, kind):
    found, moved, _ = second_pass(tmp_path, loss_type=kind, off_policy_mask_threshold=0.02)
    start, keep = model_at(), []
    with torch.no_grad():
        for (prompt, completion), advantage in zip(ROWS, ADVANTAGES, strict=True):
            gap = token_scores(start, prompt, completion)[0]
            gap = gap - token_scores(moved, prompt, completion)[0]
            keep.append([advantage >= 0 or bool(gap.mean() <= 0.02)] * len(completion))
    assert [row[0] for row in keep] == [True, True, True, False, True, True, True, False]
    expected = Loop(kind).gradient(moved, old=start, keep=keep)
    assert relative(found, expected) < 5e-6


class EngineWithLogps(GenerationBackend):
    """Replays completions and reports log-probabilities like an engine with its own rounding."""

    reports_policy_logps = False

    def __init__(self, model, gaps):
        self.model, self.gaps = model, gaps

    def sync_weights(self, step):
        pass

    @torch.no_grad()
    def generate(self, prompts, sampling, group_size):
        completions = [
            cut_at_stop(script(ids, row % group_size), sampling.stop_ids, sampling.max_tokens)[0]
            for row, ids in enumerate(prompts.token_ids)
        ]
        logps = [
            (token_scores(self.model, prompt, completion)[0] + gap).tolist()
            for prompt, completion, gap in zip(
                prompts.token_ids, completions, self.gaps, strict=True
            )
        ]
        return Generations(
            completion_ids=completions, finish_reasons=["stop"] * len(logps), sampling_logps=logps
        )


def test_the_log_probabilities_of_the_engine_decide_what_is_dropped(tmp_path):
    gaps = [9.0, 0.6, 9.0, 0.4, 9.0, math.nan, 9.0, -9.0]
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        GRPOTrainer,
        callbacks=[recorder],
        off_policy_mask_threshold=0.5,
        vllm_importance_sampling_correction=False,
    )
    trainer.backend = EngineWithLogps(tiny_model(), gaps)
    trainer.train()
    keep = [[i not in (1, 6)] * len(completion) for i, (_, completion) in enumerate(ROWS)]
    assert [a < 0 for a in ADVANTAGES] == [False, True, False, True, False, True, True, True]
    expected = Loop().gradient(model_at(), keep=keep)
    assert relative(recorder.gradients[0], expected) < 5e-6


# --- The entropy bonus ---


def mean_entropy(weights, rows):
    model = model_at(weights)
    with torch.no_grad():
        return float(torch.cat([token_scores(model, *row)[1] for row in rows]).mean())


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_entropy_bonus(tmp_path, kind):
    recorder, trainer = run(tmp_path, loss_type=kind, entropy_coef=0.3)
    with_bonus = Loop(kind, coefficient=0.3)
    expected = with_bonus.gradient(model_at())
    assert relative(recorder.gradients[0], expected) < 5e-6
    with torch.no_grad():
        plain = float(Loop(kind).loss(model_at(), ROWS, ADVANTAGES))
        whole = float(with_bonus.loss(model_at(), ROWS, ADVANTAGES))
    assert logged(trainer, "policy_loss") == [pytest.approx(plain, abs=1e-6)]
    assert logged(trainer, "loss") == [pytest.approx(whole, abs=1e-5)]
    assert logged(trainer, "entropy_coef") == [pytest.approx(0.3)]


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.3, "entropy_coef_delta": 0.1}


def check_adaptive_steps(recorder, coefficients):
    """Steps alternate between the first two prompts and the last two."""
    for i, coefficient in enumerate(coefficients):
        rows = rows_of(PROMPTS[2:] if i % 2 else PROMPTS[:2], 4)
        advantages = credit(token_sum([completion for _, completion in rows]))
        model = model_at(recorder.weights[i])
        expected = Loop(coefficient=coefficient).gradient(model, rows, advantages)
        assert relative(recorder.gradients[i], expected) < 5e-6


@pytest.mark.parametrize(
    ("target", "active", "last"),
    [
        (9.0, [0.0, 0.4, 0.45], 0.45),
        (0.1, [0.0, 0.0, 0.0], 0.05),
    ],
)
def test_adaptive_coefficient_over_three_steps(tmp_path, target, active, last):
    bounds = {"entropy_coef_min": 0.05, "entropy_coef_max": 0.45}
    settings = ADAPTIVE | bounds | {"max_steps": 3, "entropy_target": target, **split(4)}
    recorder, trainer = run(tmp_path, **settings)
    check_adaptive_steps(recorder, active)
    assert logged(trainer, "entropy_coef") == pytest.approx(active)
    assert trainer.entropy.coefficient == pytest.approx(last)
    rows = rows_of(PROMPTS[:2], 4)
    assert trainer.entropy.measured == pytest.approx(
        mean_entropy(recorder.weights[2], rows), rel=1e-6
    )


def test_adaptive_coefficient_between_two_entropies(tmp_path):
    """A target between the entropies of the two halves of the data switches the bonus."""
    first, second = (
        mean_entropy(None, rows_of(prompts, 4)) for prompts in (PROMPTS[:2], PROMPTS[2:])
    )
    target = (first + second) / 2
    rises = first <= target
    settings = ADAPTIVE | {"entropy_target": target, "max_steps": 3, "learning_rate": 1e-5}
    recorder, trainer = run(tmp_path, **settings)
    # After the first step +-0.1, after the second the opposite; active only after a low one.
    active = [0.0, 0.4, 0.0] if rises else [0.0, 0.0, 0.3]
    check_adaptive_steps(recorder, active)
    assert logged(trainer, "entropy_coef") == pytest.approx(active)


def test_adaptive_coefficient_is_restored_from_a_checkpoint(tmp_path):
    settings = ADAPTIVE | {"entropy_target": 9.0, "max_steps": 3}
    whole, trainer = run(tmp_path / "whole", **settings)
    run(tmp_path / "parts", **settings, save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "parts" / "checkpoint-2"
    state = json.loads((checkpoint / STATE_FILE).read_text())
    assert state["coefficient"] == pytest.approx(0.5)
    assert state["measured"] == pytest.approx(
        mean_entropy(whole.weights[1], rows_of(PROMPTS[2:], 4)), rel=1e-6
    )
    recorder = Recorder()
    resumed = make_trainer(tmp_path / "parts", GRPOTrainer, callbacks=[recorder], **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(recorder.gradients[0], whole.gradients[2])
    assert resumed.entropy.state() == trainer.entropy.state()
    assert resumed.entropy.coefficient == pytest.approx(0.6)


def test_no_state_is_saved_without_a_bonus(tmp_path):
    run(tmp_path, save_strategy="steps", save_steps=1)
    assert (tmp_path / "checkpoint-1").is_dir()
    assert not list(tmp_path.rglob(STATE_FILE))


# --- Precision, evaluation, metrics ---


def test_head_in_float32_over_a_model_in_bfloat16(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    start = [p.detach().clone() for p in model.parameters()]
    seen = []
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        GRPOTrainer,
        model=model,
        callbacks=[recorder],
        cast_lm_head_to_fp32=True,
        beta=0.1,
    )
    head = trainer.model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer.train()
    kinds = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert kinds.pop("lm_head.weight") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
    reference = trainer.reference.model.get_output_embeddings()
    assert reference.weight.dtype == torch.float32
    assert set(seen) == {torch.float32}
    moved = [p.detach() for p in trainer.model.parameters()]
    changed = [not torch.equal(a.to(b.dtype), b) for a, b in zip(start, moved, strict=True)]
    assert sum(changed) > len(changed) / 2
    rounded = torch.cat([p.double().flatten() for p in start])
    expected = Loop().gradient(model_at(rounded))
    assert relative(recorder.gradients[0].double(), expected) < 0.05


def test_evaluation_loss_is_a_mean_whatever_training_accumulates(tmp_path):
    trainer = make_trainer(
        tmp_path,
        GRPOTrainer,
        loss_type="cispo",
        eval_dataset=dataset(PROMPTS[:2]),
        per_device_eval_batch_size=8,
        entropy_coef=0.3,
        **split(2),
    )
    found = trainer.evaluate()
    with torch.no_grad():
        loss = Loop("cispo", high=1.2, coefficient=0.3).loss(model_at(), ROWS, ADVANTAGES)
    assert found["eval_loss"] == pytest.approx(float(loss), abs=1e-6)
    assert found["eval_entropy"] == pytest.approx(mean_entropy(None, ROWS), rel=1e-5)
    assert "eval_entropy_coef" not in found


COMMON = [
    *["num_tokens", "step_time", "reward", "reward_std", "frac_reward_zero_std", "entropy", "kl"],
    *[f"completions/{a}_{b}length" for a in ("mean", "min", "max") for b in ("", "terminated_")],
    *["completions/clipped_ratio", "rewards/token_sum/mean", "rewards/token_sum/std"],
    *["policy_loss", "entropy_coef"],
]
CLIPS = {f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean")}
CLIPS |= {"clip_ratio/low_min", "clip_ratio/high_max"}


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_metrics_of_the_contract(tmp_path, kind):
    _, trainer = run(tmp_path, loss_type=kind, beta=0.1, entropy_coef=0.1)
    names = set(trainer.state.log_history[0])
    assert names >= set(COMMON)
    own = {"cispo": {"cispo_clip_ratio"}, "vespo": {"vespo/phi_seq_mean"}, "sapo": set()}
    special = CLIPS | {"cispo_clip_ratio", "vespo/phi_seq_mean"}
    assert names & special == own.get(kind, CLIPS)


def test_cispo_and_vespo_metrics_by_hand(tmp_path):
    _, moved, trainer = second_pass(tmp_path / "cispo", loss_type="cispo", epsilon_high=1.05)
    start = model_at()
    with torch.no_grad():
        ratios = [
            (token_scores(moved, *row)[0] - token_scores(start, *row)[0]).exp() for row in ROWS
        ]
    clipped = sum(int((r > 1.05).sum()) for r, a in zip(ratios, ADVANTAGES, strict=True) if a > 0)
    shares = [0.0, clipped / sum(map(len, ratios))]
    assert clipped > 0
    assert logged(trainer, "cispo_clip_ratio") == pytest.approx(shares)
    _, moved, trainer = second_pass(tmp_path / "vespo", loss_type="vespo")
    weights = Loop("vespo").phi
    with torch.no_grad():
        phis = [
            weights(token_scores(moved, *row)[0] - token_scores(start, *row)[0], advantage)
            for row, advantage in zip(ROWS, ADVANTAGES, strict=True)
        ]
    expected = [1.0, statistics.fmean(phis)]
    assert logged(trainer, "vespo/phi_seq_mean") == pytest.approx(expected, rel=1e-5)


def test_clip_metrics_by_hand(tmp_path):
    _, moved, trainer = second_pass(tmp_path, loss_type="dapo", epsilon=0.05, epsilon_high=0.07)
    start, low, high = model_at(), [], []
    with torch.no_grad():
        for row, advantage in zip(ROWS, ADVANTAGES, strict=True):
            ratio = (token_scores(moved, *row)[0] - token_scores(start, *row)[0]).exp()
            low.append(((ratio < 0.95) & (advantage < 0)).double())
            high.append(((ratio > 1.07) & (advantage > 0)).double())
    expected = {
        "low_mean": torch.cat(low).mean(),
        "high_mean": torch.cat(high).mean(),
        "region_mean": torch.cat(low).mean() + torch.cat(high).mean(),
        "low_min": min(x.mean() for x in low),
        "high_max": max(x.mean() for x in high),
    }
    for name, value in expected.items():
        assert logged(trainer, f"clip_ratio/{name}")[1] == pytest.approx(float(value)), name
