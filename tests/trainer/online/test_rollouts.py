"""Which tokens are trained on, which rows give credit, and which have a gradient."""

import torch
from online_runs import config

from trl.distributed import Ranks
from trl.trainer.online.rollouts import assemble, credited, rows_with_gradient
from trl.types import Generations, Prompts, RewardTable

PROMPTS = Prompts(messages=["a", "a", "b", "b"], token_ids=[[5], [5], [6, 7], [6, 7]])
GENERATIONS = Generations(
    completion_ids=[[10, 1], [11, 12, 13], [1], [14, 15, 1]],
    finish=["stop", "length", "stop", "stop"],
    sampling_logps=[[-1.0, -2.0], [-3.0] * 3, [-4.0], [-5.0] * 3],
    trainable=[[True, True], [True] * 3, [True], [False, False, False]],
)


def made(folder, mode="train", **changes):
    args = config(folder, per_device_train_batch_size=4, num_generations=2, **changes)
    return assemble(PROMPTS, GENERATIONS, mode, args, Ranks())


def test_tokens_that_the_policy_wrote_are_trained_on(tmp_path):
    batch = made(tmp_path)
    assert batch.loss_mask.tolist() == [
        [True, True, False], [True, True, True], [True, False, False], [False] * 3
    ]  # fmt: skip
    assert (batch.num_loss_tokens.item(), batch.num_loss_rows.item()) == (6, 3)
    assert batch.sampling_logps[0].tolist() == [-1.0, -2.0, 0.0]
    assert (batch.mode, batch.num_micro_batches) == ("train", 1)


def test_truncated_completions_are_left_out_if_asked_to(tmp_path):
    batch = made(tmp_path, mask_truncated_completions=True)
    assert not batch.loss_mask[1].any() and batch.num_loss_tokens.item() == 3
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    table = RewardTable(
        per_function=scores[:, None],
        weights=torch.ones(1),
        total=scores,
        names=("f",),
        group_size=2,
    )
    for masks in (False, True):
        args = config(tmp_path, mask_truncated_completions=masks)
        found = credited(table, GENERATIONS, args, Ranks())
        assert found.total.isnan().tolist() == [False, masks, False, False]
        assert found.ended.tolist() == [True, False, True, True]
    assert found.less(0.5).nan_to_num(-9).tolist() == [1.0, -9, 3.0, 4.0]
    assert credited(table, GENERATIONS, config(tmp_path), Ranks()).less(0.5)[1] == 1.5


def test_an_evaluation_batch_is_one_micro_batch(tmp_path):
    cut = {"gradient_accumulation_steps": 2}
    assert made(tmp_path, **cut).num_micro_batches == 2
    assert made(tmp_path, mode="eval", **cut).num_micro_batches == 1


def test_rows_with_gradient(tmp_path):
    batch = made(tmp_path)
    assert rows_with_gradient(batch, torch.tensor([0.0, 1.0, -1.0, 1.0])) == [
        False, True, True, False
    ]  # fmt: skip
    tokens = torch.zeros(4, 3)
    tokens[0, 2] = 1.0  # beyond its end
    tokens[1, 2] = torch.nan
    assert rows_with_gradient(batch, tokens) == [False, True, False, False]
