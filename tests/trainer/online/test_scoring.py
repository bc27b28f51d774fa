"""Scoring computes what is needed and nothing else; what it leaves out changes nothing."""

import gc

import pytest
import torch
from faulty_kernels import break_kernels
from online_runs import (
    completion_logps,
    dataset,
    gradients,
    make_trainer,
    relative,
    rows_of,
    step_direction,
    token_sum,
    weights,
)
from tiny import tiny_model

from trl.batch import with_totals
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

MANY = ["ab", "cde", "f", "ghij", "kl", "mno", "p", "qrst"]


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Each training run ends with a collection; what is there already stays out of it."""
    gc.freeze()
    yield
    gc.unfreeze()


class Calls:
    """The tokens of each forward that trains a model, and the rows of each that scores it."""

    def __init__(self, trainer):
        self.training, self.scoring = [], []
        self._model, self._scores = trainer.model, trainer.scorer.frozen_scores
        trainer.scorer.frozen_scores = self._score
        trainer.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _score(self, model, batch, *others):
        if model is self._model:
            self.scoring.append(len(batch))
        return self._scores(model, batch, *others)

    def _note(self, module, args, kwargs):
        if torch.is_grad_enabled():  # trials and probes have no gradient
            self.training.append(kwargs["input_ids"].numel())


def adam(folder, reward, kind=RLOOTrainer, **changes):
    """Three updates of AdamW in float64, in which a wrong or missing gradient shows."""
    settings = {
        "model": tiny_model().double(),
        "data": dataset(MANY),
        "optim": "adamw_torch",
        "weight_decay": 0.1,
        "learning_rate": 0.01,
        "max_steps": 3,
        "log_memory": False,
    }
    trainer = make_trainer(folder, kind, reward=reward, **(settings | changes))
    calls = Calls(trainer)
    trainer.train()
    return trainer, calls


def partly_equal(completion_ids, prompts, **kwargs):
    """Zero advantages for one of the two prompts of step 1, and for both of step 2."""
    rewards = token_sum(completion_ids)
    equal = ("ab", "f", "ghij")
    return [1.0 if p in equal else r for p, r in zip(prompts, rewards, strict=True)]


CASES = [
    (RLOOTrainer, {}),
    (RLOOTrainer, {"num_iterations": 2, "max_steps": 4}),
    (RLOOTrainer, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    (RLOOTrainer, {"shared_prefix": False}),
    (GRPOTrainer, {"loss_type": "bnpo"}),
    (GRPOTrainer, {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"}),
    (GRPOTrainer, {"loss_type": "vespo", "num_iterations": 2, "max_steps": 4}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_rows_of_zero_advantage_are_left_out(tmp_path, kind, changes):
    """The weights are the same, decay and moments of AdamW included, for fewer tokens."""
    skipped, fewer = adam(tmp_path / "a", partly_equal, kind, **changes)
    whole, every = adam(tmp_path / "b", partly_equal, kind, skip_zero_advantages=False, **changes)
    expected = weights(whole.model)
    assert (weights(skipped.model) - expected).abs().max() < 1e-9
    assert (expected - weights(tiny_model().double())).abs().max() > 1e-2
    assert sum(fewer.training) < 0.9 * sum(every.training)
    assert [e["loss"] for e in skipped.state.log_history if "loss" in e] == pytest.approx(
        [e["loss"] for e in whole.state.log_history if "loss" in e], abs=1e-6
    )


def test_a_step_without_any_gradient_runs_no_forward(tmp_path):
    trainer, calls = adam(tmp_path, partly_equal)
    assert len(calls.training) == 2 and not calls.scoring
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    assert norms[1] == 0.0 and min(norms[0], norms[2]) > 0.0


def test_a_run_without_any_gradient_decays_the_weights_alone(tmp_path):
    """AdamW with zero gradients multiplies each decayed weight by 1 - lr * decay, and no other."""
    model = tiny_model().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer, calls = adam(
        tmp_path, lambda completion_ids, **kwargs: [0.5] * len(completion_ids), model=model
    )
    assert not calls.training
    for name, parameter in trainer.model.named_parameters():
        factor = 1.0 if "norm" in name else (1 - 0.01 * 0.1) ** 3
        assert torch.allclose(parameter, before[name] * factor, rtol=1e-12, atol=0.0), name


@pytest.mark.parametrize(
    "changes",
    [{"beta": 0.1}, {"entropy_coef": 0.1}, {"entropy_coef": 0.1, "top_entropy_quantile": 0.5}],
)
def test_losses_with_other_terms_skip_nothing(tmp_path, changes):
    trainer, calls = adam(tmp_path, partly_equal, GRPOTrainer, **changes)
    assert not trainer.skips_zero_advantages
    assert len(calls.training) == 3


def test_a_mixture_of_experts_skips_nothing(tmp_path):
    """Its load-balancing loss has a gradient whatever the advantages."""
    trainer = make_trainer(tmp_path)
    assert trainer.skips_zero_advantages
    trainer.router_coefficient = 0.01
    assert not trainer.skips_zero_advantages


def test_masked_rows_count_as_without_gradient(tmp_path):
    """Truncated rows that are masked have no trained-on token."""
    trainer = make_trainer(
        tmp_path,
        script=lambda ids, place: [20, 21, 22, 1] if place % 2 else [20 + place] * 9,
        mask_truncated_completions=True,
        reward=lambda completion_ids, **kwargs: [float(i % 4) for i in range(len(completion_ids))],
    )
    batch = trainer.collect([{"prompt": p} for p in ("ab", "cde") for _ in range(4)])
    assert batch.columns["has_gradient"].tolist() == [False, True, False, True] * 2


# --- Reusing what generation computed ---

KL = {
    "beta": 0.3,
    "script": None,
    "temperature": 0.7,
    "top_k": 20,
    "repetition_penalty": 1.3,
    "max_completion_length": 12,
    "log_memory": False,
}


def sampled(folder, kind=RLOOTrainer, **changes):
    """A trainer whose completions are drawn from its model, with a reference that differs."""
    trainer = make_trainer(folder, kind, **(KL | changes))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.reference.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return trainer, Calls(trainer)


@pytest.mark.parametrize("changes", [{}, {"generation_max_rows": 3}, {"logits_chunk_size": 200}])
def test_the_kl_penalty_reuses_log_probabilities_of_generation(tmp_path, changes):
    reusing, few = sampled(tmp_path / "a", **changes)
    scoring, more = sampled(tmp_path / "b", reuse_sampling_logps=False, **changes)
    ours, reference = step_direction(reusing), step_direction(scoring)
    assert relative(ours, reference) < 5e-6
    assert (len(few.scoring), len(more.scoring)) == (0, 1)
    kls = [t.state.log_history[0]["kl"] for t in (reusing, scoring)]
    assert kls[0] == pytest.approx(kls[1], abs=1e-6) and abs(kls[0]) > 1e-3


@pytest.mark.parametrize("weights_in_half", [False, True])
def test_in_half_precision_both_policies_are_scored_alike(tmp_path, weights_in_half):
    """The penalty is exactly 0 before the first update; reusing may show rounding."""
    found = []
    for reuses in (None, True):
        model = tiny_model(initializer_range=0.2)
        trainer = make_trainer(
            tmp_path / str(reuses),
            model=model.bfloat16() if weights_in_half else model,
            bf16=not weights_in_half,
            reuse_sampling_logps=reuses,
            **(KL | {"temperature": 1.0, "top_k": None, "repetition_penalty": 1.0}),
        )
        calls = Calls(trainer)
        trainer.train()
        assert len(calls.scoring) == (0 if reuses else 1)
        found.append(trainer.state.log_history[0]["kl"])
    assert found[0] == 0.0
    assert abs(found[1]) < 0.02


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2},
        {"shared_prefix": False},
        {"per_device_train_batch_size": 4, "steps_per_generation": 2},
    ],
)
def test_off_policy_or_padded_generation_needs_a_scoring_pass(tmp_path, changes):
    trainer, calls = sampled(tmp_path, **changes)
    trainer.train()
    assert calls.scoring


def test_other_algorithms_score_the_policy_only_off_policy(tmp_path):
    trainer, calls = sampled(tmp_path / "on", GRPOTrainer)
    trainer.train()
    assert not calls.scoring
    trainer, calls = sampled(tmp_path / "off", GRPOTrainer, num_iterations=2)
    trainer.train()
    assert len(calls.scoring) == 1


def test_old_log_probabilities_are_those_of_one_row_at_a_time(tmp_path):
    """Off-policy, scored in pieces smaller than a group."""
    trainer = make_trainer(tmp_path, num_iterations=2, per_device_train_batch_size=8)
    trainer.phases.batches["scoring"].size = 3
    trainer.model.train()
    batch = trainer.collect([{"prompt": p} for p in ("ab", "cde") for _ in range(4)])
    for row, (prompt, completion) in enumerate(rows_of(["ab", "cde"], 4)):
        expected = completion_logps(trainer.model, prompt, completion)
        old_logps = batch.columns["old_logps"][row]
        assert (old_logps[: len(completion)] - expected).abs().max() < 1e-5
        assert not old_logps[len(completion) :].any()


# --- Entropy ---


def mean_entropy(model, rows):
    """From full logits, one completion at a time."""
    found = []
    for prompt, completion in rows:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        every = logits.log_softmax(-1)
        found.append(-(every.exp() * every).sum(-1).detach())
    return float(torch.cat(found).mean())


def test_entropy_is_that_of_the_steps_that_log(tmp_path):
    """Weights stand still, so each step's entropy follows from its prompts."""
    trainer = make_trainer(
        tmp_path, data=dataset(MANY), max_steps=4, logging_steps=2, learning_rate=0.0
    )
    trainer.train()
    logged = [e["entropy"] for e in trainer.state.log_history if "entropy" in e]
    model = tiny_model().eval()
    expected = [mean_entropy(model, rows_of(MANY[at : at + 2], 4)) for at in (2, 6)]
    others = [mean_entropy(model, rows_of(MANY[at : at + 2], 4)) for at in (0, 4)]
    assert logged == pytest.approx(expected, abs=2e-6)
    assert min(abs(a - b) for a in expected for b in others) > 1e-5


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"logging_steps": 3}, [False, False, True, False]),
        ({"logging_steps": 3, "logging_first_step": True}, [True, False, True, False]),
        ({"logging_strategy": "epoch"}, [True] * 4),
        ({"logging_strategy": "no"}, [False] * 4),
        ({"logging_steps": 0.5}, [False, True, False, True]),
    ],
)
def test_which_steps_report(tmp_path, changes, steps):
    found = []

    def reward(completion_ids, **kwargs):
        found.append(trainer.logs_next("train"))
        return token_sum(completion_ids)

    trainer = make_trainer(
        tmp_path,
        reward=reward,
        data=dataset(MANY),
        max_steps=4,
        reward_dry_run=False,
        **changes,
    )
    trainer.train()
    assert found == steps


def test_entropy_changes_no_gradient(tmp_path):
    quiet = step_direction(make_trainer(tmp_path / "a", logging_strategy="no"))
    assert relative(step_direction(make_trainer(tmp_path / "b")), quiet) < 1e-6


def test_a_micro_batch_without_gradient_has_zero_gradients(tmp_path):
    """Not absent ones: the optimizer would leave those weights out."""
    trainer = make_trainer(
        tmp_path, reward=lambda completion_ids, **kwargs: [1.0] * len(completion_ids)
    )
    trainer.model.train()
    batch = trainer.collect([{"prompt": p} for p in ("ab", "cde") for _ in range(4)])
    (batch,) = with_totals([batch], trainer.ranks)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert gradients(trainer.model).shape == weights(trainer.model).shape
    assert not gradients(trainer.model).any()


def test_a_kernel_that_fails_in_half_precision_fails_no_step(tmp_path, monkeypatch):
    """Rows are generated and trained on as if nothing were shared."""
    settings = {"script": None, "bf16": True}
    plain = make_trainer(tmp_path / "plain", shared_prefix=False, **settings)
    expected = step_direction(plain)
    break_kernels(monkeypatch, "error", torch.bfloat16)
    trainer = make_trainer(tmp_path / "faulty", **settings)
    assert torch.equal(step_direction(trainer), expected)
    assert not trainer.scorer.check.enabled
