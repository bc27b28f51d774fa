"""Defaults shared by every trainer."""

import dataclasses

import pytest
from transformers import TrainingArguments

from trl.imports import is_available
from trl.trainer.base.base_config import BaseConfig, ReferenceOptions, _layers_only
from trl.trainer.base.keyword_arguments import EARLIER_ARGUMENTS
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.online.online_config import OnlineConfig
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.sft_config import SFTConfig


def make(**changes):
    return BaseConfig("out", **({"use_cpu": True, "report_to": "none"} | changes))


def test_defaults():
    config = make()
    assert config.logging_steps == 10
    assert config.gradient_checkpointing is True
    assert config.bf16 is True
    assert config.trust_remote_code is False
    assert config.model_init_kwargs is None
    assert config.legacy_options == EARLIER_ARGUMENTS


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"fp16": True}, False), ({"bf16": False}, False), ({"bf16": True}, True), ({}, True)],
)
def test_bf16_yields_to_fp16_and_to_the_caller(given, expected):
    assert make(**given).bf16 is expected


def test_bf16_without_a_fitting_gpu(monkeypatch):
    for supported in (True, False):
        monkeypatch.setattr(
            "trl.trainer.base.base_config.is_torch_bf16_gpu_available",
            lambda value=supported: value,
        )
        if supported:
            # transformers itself refuses bf16 where no GPU supports it.
            monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)
            monkeypatch.setattr(TrainingArguments, "world_size", 1)  # which that would find out
        assert make(use_cpu=False, report_to=[]).bf16 is supported


@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_is_what_the_loop_reads(checkpointing):
    """Whatever name this release of transformers reads the option under."""
    config = make(gradient_checkpointing=checkpointing)
    names = {"gradient_checkpointing", "activation_checkpointing"}
    found = {getattr(config, n) for n in names if hasattr(config, n)}
    assert found == {checkpointing}


@pytest.mark.parametrize(
    ("name", "text", "value", "others"),
    [
        (
            "model_init_kwargs",
            '{"a": 1, "b": {"c": null, "d": [true, "x"]}}',
            {"a": 1, "b": {"c": None, "d": [True, "x"]}},
            {},
        ),
        (
            "lr_scheduler_kwargs",
            '{"num_cycles": 0.25}',
            {"num_cycles": 0.25},
            {"lr_scheduler_type": "cosine"},
        ),
    ],
)
def test_mappings_may_be_json(name, text, value, others):
    assert getattr(make(**{name: text}, **others), name) == value
    assert getattr(make(**{name: value}, **others), name) == value


def test_every_new_option_has_help():
    ours = [kind for kind in BaseConfig.__mro__ if kind.__module__.startswith("trl.")]
    declared = [pair for kind in ours for pair in kind.__annotations__.items()]
    own = {name for name, kind in declared if "ClassVar" not in str(kind) and name[0] != "_"}
    helps = {f.name: f.metadata.get("help") for f in dataclasses.fields(BaseConfig)}
    assert {"model_init_kwargs", "trust_remote_code", "bf16"} <= own
    assert all(helps[name] and helps[name].endswith((".", "(JSON).")) for name in own)


def test_liger_kernels_are_those_of_layers():
    """Its loss would give a forward without the log-probabilities of tokens."""
    off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert _layers_only({}) == off
    assert _layers_only({"rope": False}) == {"rope": False} | off
    for name in off:
        with pytest.raises(ValueError, match=f"'{name}': True}} cannot be used"):
            _layers_only({name: True})


@pytest.mark.skipif(is_available("liger_kernel"), reason="liger-kernel is installed")
def test_liger_kernels_need_their_package():
    with pytest.raises(ImportError, match=r"use_liger_kernel=True needs .* 'trl\[liger\]'"):
        make(use_liger_kernel=True)


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        ("wandbb", "'wandbb' is not a known tracker. Did you mean wandb?"),
        ("clearml", "'clearml' needs the package .clearml., which is not installed."),
    ],
)
def test_trackers_that_cannot_be_reported_to(tracker, words):
    assert not is_available("clearml")
    with pytest.raises(ValueError, match=words):
        make(report_to=tracker)
    with pytest.raises(ValueError, match=words):
        make(report_to=["tensorboard", tracker] if is_available("tensorboard") else [tracker])


@pytest.mark.parametrize("given", [{"torch_compile": True}, {"torch_compile_backend": "eager"}])
def test_compiling_is_refused_with_a_reason(given):
    with pytest.raises(ValueError, match="torch_compile=True cannot be used: micro-batches differ"):
        make(**(given))


def test_nothing_waits_for_the_loss_of_each_micro_batch():
    assert make().logging_nan_inf_filter is False
    assert make(logging_nan_inf_filter=True).logging_nan_inf_filter is False


@pytest.mark.parametrize("kind", [OnlineConfig, DPOConfig])
def test_configurations_with_a_reference_have_its_options(kind):
    config, own = kind("out", use_cpu=True, report_to="none"), {"beta": 0.1}
    for field in dataclasses.fields(ReferenceOptions):
        default = own.get(field.name, field.default) if kind is DPOConfig else field.default
        assert getattr(config, field.name) == default, field.name


@pytest.mark.parametrize("kind", [SFTConfig, RLOOConfig])
def test_a_warmup_ratio_is_a_share_of_all_steps(tmp_path, kind):
    with pytest.warns(FutureWarning, match="warmup_ratio is now warmup_steps"):
        args = kind(str(tmp_path), warmup_ratio=0.25, use_cpu=True, report_to="none")
    assert args.get_warmup_steps(40) == 10
