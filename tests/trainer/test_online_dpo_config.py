import pytest

from trl.trainer.online_dpo_config import OnlineDPOConfig


def make(**changes):
    return OnlineDPOConfig("out", use_cpu=True, report_to="none", **changes)


def test_defaults():
    args = make()
    assert (args.learning_rate, args.max_completion_length, args.temperature) == (5e-7, 64, 0.9)
    assert (args.beta, args.loss_type, args.disable_dropout) == (0.1, "sigmoid", True)
    assert not args.make_algorithm().needs.old_logps


@pytest.mark.parametrize(("rows", "accumulation"), [(1, 1), (3, 4)])
def test_batches_count_prompts(rows, accumulation):
    plan = make(
        per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation
    ).batch_plan
    assert (plan.micro_batch, plan.round_rows) == (2 * rows, 2 * rows * accumulation)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.2, [0.2, 0.2]), ([0.2], [0.2, 0.2]), ([0.3, 0.1], [0.3, 0.1]), ((0.3, 0.1), [0.3, 0.1])],
)
def test_beta_of_an_epoch(beta, expected):
    args = make(beta=beta)
    assert [args.beta_in(0), args.beta_in(5)] == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beta": []}, "beta"),
        ({"beta": [0.1, 0.0]}, "beta"),
        ({"beta": -1.0}, "beta"),
        ({"beta": "0.1"}, "beta"),
        ({"loss_type": "hinge"}, "loss_type"),
        ({"num_generations": 4}, "num_generations"),
        ({"num_generations_eval": 1}, "num_generations_eval"),
        ({"vllm_importance_sampling_correction": True}, "vllm_importance_sampling_correction"),
        ({"use_vllm": True, "ds3_gather_for_generation": False}, "ds3_gather_for_generation"),
    ],
)
def test_what_cannot_be_used(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_old_names():
    with pytest.warns(FutureWarning, match="max_new_tokens is now max_completion_length") as caught:
        args = make(max_new_tokens=32, gpu_memory_utilization=0.5, use_vllm=True, max_length=128)
    assert (args.max_completion_length, args.vllm_gpu_memory_utilization) == (32, 0.5)
    assert len([w for w in caught if w.category is FutureWarning]) == 1
    with pytest.raises(TypeError, match="pass the judge to the trainer"):
        make(judge="pair_rm")
