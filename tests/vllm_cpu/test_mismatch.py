"""The probabilities of a real engine are those of the trainer, once its filters are replayed."""

import pytest
from online_runs import make_trainer
from shared_vllm import engine, needs_vllm, policy_model

from trl.generation.vllm import factory
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

pytestmark = [needs_vllm, pytest.mark.vllm]


@pytest.mark.parametrize(
    ("kind", "filters"),
    [
        (RLOOTrainer, {"top_p": 0.8}),
        (GRPOTrainer, {"top_k": 20, "temperature": 0.7}),
        (RLOOTrainer, {"min_p": 0.6, "top_p": 0.9, "num_iterations": 2}),
    ],
)
def test_the_mean_ratio_is_one(tmp_path, monkeypatch, kind, filters):
    """Without the replay it is the mass of what the filters leave."""
    monkeypatch.setattr(factory, "start_engine", lambda *args: engine())
    trainer = make_trainer(
        tmp_path,
        kind,
        script=None,
        model=policy_model(),
        use_vllm=True,
        max_completion_length=16,
        per_device_train_batch_size=16,
        vllm_importance_sampling_mode="token_truncate",
        vllm_max_logp_gap=0.005,
        vllm_probe_syncs=0,
        skip_zero_advantages=False,
        **filters,
    )
    trainer.train()
    found = next(e for e in trainer.state.log_history if "loss" in e)
    ratio, gap = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
    assert found[f"{ratio}/mean"] == pytest.approx(1.0, abs=0.01)
    assert found[f"{ratio}/min"] > 0.9 and found[f"{ratio}/max"] < 1.1
    assert found["sampling/kept_mass"] < 0.9 and found[f"{gap}/mean"] > 0.1
    assert found["sampling/replayed_logp_difference/mean"] < 0.005
