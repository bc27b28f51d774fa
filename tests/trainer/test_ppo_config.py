import pytest

from trl.trainer.ppo_config import PPOConfig


def make(**changes):
    return PPOConfig("out", use_cpu=True, report_to="none", **changes)


def test_defaults():
    args = make()
    assert (args.learning_rate, args.beta, args.temperature) == (3e-6, 0.05, 0.7)
    assert (args.num_generations, args.max_completion_length, args.num_iterations) == (1, 53, 4)
    assert args.make_algorithm().needs.old_logps and args.disable_dropout


@pytest.mark.parametrize(("passes", "steps", "accumulation"), [(1, 1, 1), (4, 2, 3), (2, 4, 1)])
def test_a_round_serves_passes_of_optimizer_steps(passes, steps, accumulation):
    plan = make(
        num_ppo_epochs=passes, num_mini_batches=steps, gradient_accumulation_steps=accumulation
    ).batch_plan
    assert plan.micro_steps_per_round == passes * steps * plan.accumulation
    assert plan.round_rows == 8 * steps * accumulation


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_iterations": 2}, "num_iterations=2 and num_ppo_epochs=4"),
        ({"num_mini_batches": 2, "steps_per_generation": 3}, "num_mini_batches=2 cannot"),
        ({"num_generations": 0}, "num_generations >= 1"),
        ({"kl_estimator": "k2"}, "kl_estimator"),
        ({"gamma": 1.5}, "gamma"),
        ({"target_kl": 0.0}, "target_kl"),
        ({"use_vllm": True, "ds3_gather_for_generation": False}, "ds3_gather_for_generation"),
    ],
)
def test_what_cannot_be_used(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)
