"""Groups of options that configurations of trainers of every kind inherit."""

import dataclasses

import pytest

from trl.trainer.base.base_config import BaseConfig
from trl.trainer.base.option_groups import (
    LoopOptions,
    MemoryOptions,
    PolicyOptions,
    ReferenceOptions,
)
from trl.trainer.online.online_config import OnlineConfig

GROUPS = (LoopOptions, MemoryOptions, PolicyOptions, ReferenceOptions)


@pytest.mark.parametrize(
    ("group", "kind"),
    [*((group, BaseConfig) for group in GROUPS[:3]), (ReferenceOptions, OnlineConfig)],
)
def test_configurations_have_them_with_their_defaults(group, kind):
    config = kind("out", use_cpu=True, report_to="none")
    for field in dataclasses.fields(group):
        assert getattr(config, field.name) == field.default, field.name


def test_no_option_stands_in_two_groups():
    names = [field.name for group in GROUPS for field in dataclasses.fields(group)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("logits_chunk_size", -1, "at least 0"),
        ("max_grad_norm", -1, "at least 0"),
        ("empty_cache", "auot", "one of never, auto, always. Did you mean auto"),
        ("checkpoint_checksums", "none", "one of sampled, all"),
    ],
)
def test_their_ranges_hold_for_configurations_without_generation(name, value, legal):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be {legal}"):
        BaseConfig("out", use_cpu=True, report_to="none", **{name: value})
