"""The tokens of a forward against those that the scorer lays out."""

import pytest
import torch
from online_runs import config

from trl.memory.settings import RunSettings
from trl.memory.sharding import Sharding
from trl.models import packed_passes as passes
from trl.models.packed_attention import KEYWORD
from trl.models.packed_layout import packed_layout, plain_layout
from trl.types import Rollout

CPU = torch.device("cpu")


def rollout(prompts, group_size, prompt, completion):
    """Rows whose completions differ from their first token on."""
    rows = prompts * group_size
    mask = torch.ones(rows, completion, dtype=torch.bool)
    return Rollout(
        prompt_ids=[[row // group_size] * prompt for row in range(rows)],
        completion_ids=[[100 + row] * completion for row in range(rows)],
        row_ids=list(range(rows)),
        loss_mask=mask,
        num_loss_tokens=mask.sum(),
        num_loss_rows=torch.tensor(rows),
    )


def settings(group_size, prompt, completion, micro_batch, **more):
    return RunSettings(group_size, prompt, completion, micro_batch, **more)


@pytest.mark.parametrize(("prompts", "group_size"), [(1, 4), (3, 2)])
def test_tokens_are_those_of_the_layouts(prompts, group_size):
    batch = rollout(prompts, group_size, 7, 5)
    run = settings(group_size, 7, 5, len(batch))
    packed = packed_layout(batch, CPU).inputs["input_ids"]
    assert run.forward_passes(cuts=False) == [packed.numel()]
    plain = plain_layout(batch, 0, CPU).inputs["input_ids"]
    assert run.replace(shared_prefix=False).forward_passes(cuts=True) == [plain.numel()]


@pytest.mark.parametrize(
    ("prompts", "group_size", "prompt", "completion"),
    [(1, 8, 100, 300), (1, 4, 4000, 500), (2, 4, 1000, 600), (1, 2, 10, 2500), (1, 4, 100, 100)],
)
def test_passes_are_those_of_the_scorer(prompts, group_size, prompt, completion):
    batch = rollout(prompts, group_size, prompt, completion)
    run = settings(group_size, prompt, completion, len(batch))
    layout = packed_layout(batch, CPU)
    found = run.forward_passes(cuts=True)
    with torch.no_grad():
        is_cut = passes.wants_passes(torch.nn.Identity(), layout)
    assert is_cut == (len(found) > 1)
    if is_cut:
        cut = passes._tail_passes(layout.inputs[KEYWORD], {}, CPU)
        assert found == [prompts * prompt, *(at.stop - at.start for at, _ in cut)]


@pytest.mark.parametrize("group_size", range(2, 9))
@pytest.mark.parametrize("rows", range(1, 17))
def test_most_prompts_in_a_micro_batch(group_size, rows):
    """Micro-batches cut a long row of groups anywhere a multiple of their size allows."""
    found = settings(group_size, 1, 1, rows).groups(rows)
    starts = range(0, rows * group_size, rows)
    seen = [len({row // group_size for row in range(at, at + rows)}) for at in starts]
    assert found >= max(seen)
    assert found <= max(seen) + 1


def test_rows_and_autocast():
    run = settings(4, 1, 1, 8, slices=3, product_bytes=2)
    assert run.rows == 24
    assert run.autocast
    assert not run.replace(weight_bytes=2).autocast


def test_a_forward_over_sharded_weights_is_one_pass():
    run = RunSettings(8, 2000, 600, 8)
    assert len(run.forward_passes(cuts=True)) > 1
    assert len(run.replace(sharding=Sharding("zero", 2, 2)).forward_passes(cuts=True)) > 1
    assert len(run.replace(sharding=Sharding("fsdp2", 3, 2)).forward_passes(cuts=True)) == 1


def test_each_number_comes_from_its_option(tmp_path):
    args = config(
        tmp_path,
        per_device_train_batch_size=6,
        num_generations=3,
        gradient_accumulation_steps=4,
        steps_per_generation=2,
        num_iterations=5,
        max_completion_length=7,
        optim="adafactor",
        optim_args="scale_parameter=False",
        gradient_checkpointing=False,
        shared_prefix=False,
        logits_chunk_size=11,
        generation_max_rows=13,
        generation_max_kv_gb=0.5,
        ds3_gather_for_generation=False,
        beta=0.1,
    )
    assert RunSettings.of(args, prompt=17, product_bytes=2, completion=8) == RunSettings(
        group_size=3,
        prompt=17,
        completion=8,
        micro_batch=6,
        slices=2,
        accumulation=4,
        passes=5,
        product_bytes=2,
        optimizer="adafactor",
        optimizer_args="scale_parameter=False",
        gradient_checkpointing=False,
        reference=True,
        scores_policy=True,
        shared_prefix=False,
        logits_chunk=11,
        generation_rows=13,
        generation_kv_gb=0.5,
        gathers=False,
    )
    assert RunSettings.of(args, prompt=1).completion == 7
