"""Whole training runs with a real server."""

import pytest
from online_runs import dataset, make_trainer
from shared_vllm import needs_vllm, policy_model
from vllm_runs import check_environments, check_reward_rises, check_seeds, completions, logged
from vllm_server import shared_server

from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

pytestmark = [needs_vllm, pytest.mark.vllm]
ROUNDS = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}


def trainer_of(folder, kind=RLOOTrainer, server=None, **changes):
    settings = {"script": None, "use_vllm": True, "vllm_mode": "server", "max_steps": 2}
    settings |= {"vllm_probe_syncs": 1, "vllm_server_timeout": 60}
    settings |= {"model": policy_model(), "optim": "adamw_torch", "learning_rate": 1e-2}
    if "vllm_server_base_url" not in changes:
        settings["vllm_server_base_url"] = (server or started_server()).url
    return make_trainer(folder, kind, **(settings | changes))


def started_server():
    shared_server().connect()
    return shared_server()


@pytest.mark.parametrize("kind", [RLOOTrainer, GRPOTrainer])
def test_the_reward_rises(tmp_path, kind):
    trainer = check_reward_rises(trainer_of, tmp_path, kind)
    gaps = logged(trainer, "vllm/logp_gap")
    assert len(gaps) == 20 and max(gaps) <= 1e-4
    assert len(logged(trainer, "vllm/sync_seconds")) == 20


def test_same_seed_same_completions(tmp_path):
    check_seeds(trainer_of, tmp_path)


def test_rows_act_in_environments(tmp_path):
    check_environments(trainer_of, tmp_path)


def test_evaluation_uses_the_same_server(tmp_path):
    trainer = trainer_of(
        tmp_path,
        eval_dataset=dataset(),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
        num_generations_eval=2,
        **ROUNDS,
    )
    trainer.train()
    assert len(completions(tmp_path, "eval")) == 2 * 8
    assert len(logged(trainer, "eval_reward")) == 2
    assert trainer.backend.context_length == 128
    assert trainer.backend._num_syncs == 3, "one for each step, and one for the last evaluation"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": lambda: policy_model().bfloat16()}, "in float32 and the policy in bfloat16"),
        ({"model": lambda: policy_model(num_hidden_layers=3)}, "num_hidden_layers=2 and the .* 3"),
        ({"max_completion_length": 128}, "context of 128 tokens, but max_completion_length=128"),
        ({"generation_kwargs": {"flat_logprobs": True}}, "'flat_logprobs'. is not an option of"),
    ],
    ids=["dtype", "shape", "context", "option"],
)
def test_a_server_that_does_not_fit_is_refused(tmp_path, changes, words):
    made = {name: value() if callable(value) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=words):
        trainer_of(tmp_path, **made)


def test_a_prompt_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match="row 1 of train_dataset has 130 tokens"):
        trainer_of(tmp_path, data=dataset(["ab", "c" * 130]))
