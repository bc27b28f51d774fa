"""The tokens of a forward against those that the scorer lays out; the options of accelerate."""

import json
from itertools import islice

import pytest
import torch
from online_runs import config

from trl.memory.settings import RunSettings, Sharding, options_of_environment, read_sharding
from trl.models import packed_layout as passes
from trl.models.packed_attention import KEYWORD
from trl.models.packed_layout import packed_layout, plain_layout
from trl.types import Rows

CPU = torch.device("cpu")


def rollout(prompts, group_size, prompt, completion):
    """Rows whose completions differ from their first token on."""
    rows = prompts * group_size
    return Rows.of(
        [([row // group_size] * prompt, [100 + row] * completion) for row in range(rows)]
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
        cuts = [cut for group in layout.inputs[KEYWORD].groups for cut in group.tails]
        counts = passes.tails_of_passes([b - a for a, b in cuts], prompts * prompt)
        rest = iter(cuts)
        runs = [list(islice(rest, count)) for count in counts]
        assert found == [prompts * prompt, *(run[-1][1] - run[0][0] for run in runs)]


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


def test_ranks_divide_the_tokens_of_rows():
    run = RunSettings(1, 0, 1001, 8, sharding=Sharding("fsdp2", 3, 4, per_row=2))
    assert run.forward_passes(cuts=False) == [8 * 1000 // 2]
    alone = run.replace(sharding=Sharding("fsdp2", 3, 4))
    assert alone.forward_passes(cuts=False) == [8 * 1000]


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


# --- Options of accelerate ---


ZERO = {"use_deepspeed": True}
FSDP = {"use_fsdp": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Sharding(ranks=8)),
        (ZERO | {"zero_stage": 1}, Sharding("zero", 1, 8, syncs=True)),
        (ZERO | {"zero_stage": "3"}, Sharding("zero", 3, 8, syncs=True)),
        (ZERO, Sharding("zero", 2, 8, syncs=True)),  # accelerate's default
        (
            ZERO | {"zero_stage": 2, "offload_optimizer_device": "cpu"},
            Sharding("zero", 2, 8, offloads_optimizer=True, syncs=True),
        ),
        (
            ZERO | {"zero_stage": 3, "offload_param_device": "cpu"},
            Sharding("zero", 3, 8, offloads_weights=True, syncs=True),
        ),
        (
            ZERO | {"zero_stage": 2, "offload_param_device": "cpu"},
            Sharding("zero", 2, 8, syncs=True),
        ),
        (FSDP, Sharding("fsdp1", 3, 8)),
        (FSDP | {"fsdp_sharding_strategy": "2"}, Sharding("fsdp1", 3, 8, keeps_weights=True)),
        (FSDP | {"fsdp_sharding_strategy": "HYBRID_SHARD"}, Sharding("fsdp1", 3, 4)),
        (
            FSDP | {"fsdp_sharding_strategy": "NO_SHARD"},
            Sharding("fsdp1", 0, 8, keeps_weights=True),
        ),
        (
            FSDP | {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
            Sharding("fsdp2", 3, 8),
        ),
        (
            FSDP | {"fsdp_version": "2", "fsdp_reshard_after_forward": "false"},
            Sharding("fsdp2", 3, 8, keeps_weights=True),
        ),
        (
            FSDP | {"fsdp_version": 2, "parallelism_config_cp_size": 2},
            Sharding("fsdp2", 3, 8, per_row=2),
        ),
        (
            {"use_deepspeed": True, "zero_stage": 3, "parallelism_config_sp_size": "2"},
            Sharding("zero", 3, 8, per_row=2, syncs=True),
        ),
        (
            FSDP | {"fsdp_version": 2, "parallelism_config_dp_replicate_size": "4"},
            Sharding("fsdp2", 3, 2),
        ),
        (
            FSDP | {"fsdp_version": 2, "fsdp_offload_params": True},
            Sharding("fsdp2", 3, 8, offloads_optimizer=True, offloads_weights=True),
        ),
    ],
)
def test_options_of_accelerate(options, expected):
    assert read_sharding(options | {"num_processes": 8, "num_machines": 2}) == expected


def test_the_file_of_deepspeed_wins(tmp_path):
    path = tmp_path / "ds.json"
    own = {"stage": 3, "reduce_bucket_size": 1e6, "stage3_max_live_parameters": 2e6}
    own |= {"sub_group_size": "auto", "offload_optimizer": {"device": "nvme"}}
    path.write_text(json.dumps({"zero_optimization": own}))
    found = read_sharding(ZERO | {"zero_stage": 2, "deepspeed_config_file": str(path)})
    assert (found.stage, found.bucket, found.live) == (3, 1_000_000, 2_000_000)
    assert found.sub_group == Sharding.sub_group
    assert found.offloads_optimizer


def test_an_unknown_strategy_is_an_error():
    with pytest.raises(ValueError, match="fsdp_sharding_strategy=SOME: choose from full_shard"):
        read_sharding(FSDP | {"fsdp_sharding_strategy": "SOME"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "DDP"),
        (ZERO | {"zero_stage": 3}, "ZeRO-3"),
        (FSDP | {"fsdp_version": 2}, "FSDP2"),
        (FSDP | {"fsdp_sharding_strategy": 2}, "FSDP1, weights kept until the backward pass"),
        (FSDP | {"fsdp_sharding_strategy": 3}, "FSDP1, nothing divided"),
    ],
)
def test_names(options, words):
    assert read_sharding(options).name == words


def test_workers_read_the_same_from_their_environment():
    launched = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    environment = launched | {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    }
    found = read_sharding(options_of_environment(environment))
    assert found == Sharding("zero", 3, 4, offloads_optimizer=True, syncs=True)
    environment = launched | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "HOME": "/"}
    environment |= {"FSDP_RESHARD_AFTER_FORWARD": "false", "ACCELERATE_USE_DEEPSPEED": "false"}
    found = read_sharding(options_of_environment(environment))
    assert found == Sharding("fsdp2", 3, 4, keeps_weights=True)
    divided = environment | {"PARALLELISM_CONFIG_CP_SIZE": "2"}
    found = read_sharding(options_of_environment(divided))
    assert found == Sharding("fsdp2", 3, 4, keeps_weights=True, per_row=2)
    hybrid = launched | {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}
    assert read_sharding(options_of_environment(hybrid)) == Sharding("fsdp1", 3, 2)
    assert read_sharding(options_of_environment({})) == Sharding(ranks=1)


def test_fractions():
    assert [Sharding("zero", 2, 4).fraction(stage) for stage in (1, 2, 3)] == [0.25, 0.25, 1]
