import pytest

from trl.trainer.reward_config import RewardConfig


def make(**changes):
    return RewardConfig("out", **({"use_cpu": True, "bf16": False} | changes))


def test_defaults():
    args = make()
    assert (args.learning_rate, args.max_length, args.logging_steps) == (1e-4, 1024, 10)
    assert args.disable_dropout and args.center_rewards_coefficient is None
    assert args.trains_reward_model and not hasattr(args, "beta")


@pytest.mark.parametrize("name", ["center_rewards_coefficient", "router_aux_loss_coef"])
def test_values_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name}=-0.5 must be at least 0"):
        make(**{name: -0.5})
