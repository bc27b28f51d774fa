"""What engines read of a trainer's policy."""

import pytest
import torch
from online_runs import completion_logps, make_trainer
from tiny import tiny_model


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float32, {}, torch.float32),
        (torch.float16, {}, torch.float16),
        (torch.float32, {"bf16": True}, torch.bfloat16),
    ],
)
def test_the_precision_is_that_of_training(tmp_path, dtype, options, expected):
    trainer = make_trainer(tmp_path, model=tiny_model().to(dtype), **options)
    assert trainer.policy.dtype is expected


def test_the_handle_follows_the_policy(tmp_path):
    trainer = make_trainer(tmp_path, temperature=0.7)
    policy, first = trainer.policy, trainer.model
    prompt, completion = [20, 21], [30, 31, 1]
    assert policy.model is first
    trainer.model = tiny_model(seed=1)  # as engines that shard weights do
    assert policy.model is trainer.model is not first
    expected = completion_logps(trainer.model, prompt, completion, 0.7)
    assert torch.allclose(torch.tensor(policy.logps(prompt, completion)), expected, atol=1e-5)


def test_the_policy_is_whole_and_evaluates_for_inference(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.train()
    with trainer.policy.inference() as bare:
        assert not bare.training and bare is trainer.accelerator.unwrap_model(trainer.model)
    assert trainer.model.training
