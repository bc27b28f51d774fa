"""Options of accelerate, and what they say about who holds what."""

import json

import pytest

from trl.memory.sharding import Sharding, options_of_environment, read_sharding

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
            FSDP | {"fsdp_version": 2, "fsdp_offload_params": True},
            Sharding("fsdp2", 3, 8, offloads_optimizer=True, offloads_weights=True),
        ),
    ],
)
def test_options_of_accelerate(options, expected):
    assert read_sharding(options, 8, machines=2) == expected


def test_the_file_of_deepspeed_wins(tmp_path):
    path = tmp_path / "ds.json"
    own = {"stage": 3, "reduce_bucket_size": 1e6, "stage3_max_live_parameters": 2e6}
    own |= {"sub_group_size": "auto", "offload_optimizer": {"device": "nvme"}}
    path.write_text(json.dumps({"zero_optimization": own}))
    found = read_sharding(ZERO | {"zero_stage": 2, "deepspeed_config_file": str(path)}, 4)
    assert (found.stage, found.bucket, found.live) == (3, 1_000_000, 2_000_000)
    assert found.sub_group == Sharding.sub_group
    assert found.offloads_optimizer


def test_an_unknown_strategy_is_an_error():
    with pytest.raises(ValueError, match="fsdp_sharding_strategy=SOME: choose from full_shard"):
        read_sharding(FSDP | {"fsdp_sharding_strategy": "SOME"}, 2)


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
    assert read_sharding(options, 2).name == words


def test_workers_read_the_same_from_their_environment():
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    }
    found = read_sharding(options_of_environment(environment), 4)
    assert found == Sharding("zero", 3, 4, offloads_optimizer=True, syncs=True)
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "HOME": "/"}
    environment |= {"FSDP_RESHARD_AFTER_FORWARD": "false", "ACCELERATE_USE_DEEPSPEED": "false"}
    found = read_sharding(options_of_environment(environment), 4)
    assert found == Sharding("fsdp2", 3, 4, keeps_weights=True)
    assert read_sharding(options_of_environment({}), 4) == Sharding(ranks=4)


def test_shares():
    assert [Sharding("zero", 2, 4).share(what) for what in (1, 2, 3)] == [0.25, 0.25, 1]
