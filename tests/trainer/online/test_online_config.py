"""Options shared by every trainer that generates."""

import warnings

import pytest
from accelerate import ParallelismConfig
from online_runs import config

from trl.algorithms.rloo import RLOO
from trl.ops.policy_losses import MODES
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.online.online_config import OnlineConfig
from trl.trainer.rloo_config import RLOOConfig

KINDS = pytest.mark.parametrize("kind", [RLOOConfig, GRPOConfig])
MODE, HIGH = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
LOW = "vllm_importance_sampling_clip_min"


def make(**changes):
    return OnlineConfig("out", **({"use_cpu": True, "report_to": "none"} | changes))


def test_batch_plan():
    config = make(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        steps_per_generation=6,
        num_generations=8,
        num_iterations=2,
    )
    plan = config.batch_plan
    assert config.generation_batch_size == plan.round_rows == 24
    assert (plan.micro_batch, plan.num_processes, plan.micro_batches) == (4, 1, 6)
    assert (plan.accumulation, plan.group_size, plan.iterations) == (3, 8, 2)
    assert make(per_device_train_batch_size=4, generation_batch_size=12).steps_per_generation == 3


@pytest.mark.parametrize(
    ("changes", "in_reward", "expected"),
    [
        ({}, True, False),
        ({"use_vllm": True}, True, True),
        ({"use_transformers_continuous_batching": True}, True, True),
        ({"reuse_sampling_logps": False}, True, True),
        ({"bf16": True}, True, True),
        ({"bf16": True, "reuse_sampling_logps": True}, True, False),
        ({"bf16": True}, False, False),
        ({"use_vllm": True, "beta": 0.0}, True, False),
        ({"use_vllm": True}, False, False),
        ({"num_iterations": 2}, False, True),
    ],
)
def test_the_policy_is_scored_where_its_log_probabilities_are_not_known(
    monkeypatch, changes, in_reward, expected
):
    algorithm = RLOO(beta=changes.get("beta", 0.1) if in_reward else 0.0)
    monkeypatch.setattr(OnlineConfig, "make_algorithm", lambda self: algorithm)
    common = {"num_generations": 4, "beta": 0.1, "bf16": False}
    assert make(**(common | changes)).scores_policy is expected


def test_group_sizes():
    config = make(num_generations=4)
    assert (config.group_size_in("train"), config.group_size_in("eval")) == (4, 4)
    assert make(num_generations=4, num_generations_eval=1).group_size_in("eval") == 1


@pytest.mark.parametrize(
    ("value", "size", "legal"), [(0, 8, "at least 1"), (3, 4, "per_device_eval_batch_size=3 or 6")]
)
def test_evaluation_groups_are_checked_when_there_is_evaluation(value, size, legal):
    settings = {"num_generations_eval": value, "per_device_eval_batch_size": size}
    assert make(**settings).group_size_in("eval") == value
    with pytest.raises(ValueError, match=legal):
        make(eval_strategy="steps", eval_steps=1, **settings)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("num_iterations", (0,), (1, 2)),
        ("epsilon", (-0.1,), (0.0,)),
        ("ref_model_mixup_alpha", (-0.1, 1.1), (0.0, 1.0)),
        ("ref_model_sync_steps", (0,), (1,)),
        ("reward_timeout", (0.0, -1.0), (None, 0.5)),
        ("non_finite", ("ignore",), ("raise", "skip")),
    ],
)
def test_ranges(name, bad, good):
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name}={value!r} must be "):
            make(**{name: value})
    for value in good:
        assert getattr(make(**{name: value}), name) == value


def test_moving_the_reference_needs_one():
    with pytest.raises(ValueError, match="set beta above 0"):
        make(sync_ref_model=True)
    assert make(sync_ref_model=True, beta=0.1).sync_ref_model


@pytest.mark.parametrize(
    ("given", "found"),
    [("auto", None), ("None", None), ("null", None), ("64", 64), (8, 8), (None, None)],
)
def test_padding(given, found):
    assert make(pad_to_multiple_of=given).pad_to_multiple_of == found


@pytest.mark.parametrize("given", ["eight", -8])
def test_padding_to_what_is_no_number_of_tokens(given):
    with pytest.raises(
        ValueError, match=f"pad_to_multiple_of='{given}' must be a number of tokens"
    ):
        make(pad_to_multiple_of=given)


@pytest.mark.parametrize(
    "name",
    ["generation_kwargs", "chat_template_kwargs", "transformers_continuous_batching_config"],
)
def test_mappings_may_be_json(name):
    assert getattr(make(**{name: '{"a": [1, true]}'}), name) == {"a": [1, True]}


def test_split_sequences_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"cp_size=2 \(or sp_size\): context parallelism is for"):
        make(parallelism_config=ParallelismConfig(cp_size=2))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")  # by `accelerate launch`
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ValueError, match=r"cp_size=2 \(or sp_size\): context parallelism is for"):
        make()


def test_generation_from_shards_is_not_for_vllm():
    assert make(ds3_gather_for_generation=False).ds3_gather_for_generation is False
    with pytest.raises(ValueError, match="ds3_gather_for_generation=False cannot be used with use"):
        make(ds3_gather_for_generation=False, use_vllm=True)


def test_options_of_vllm_without_it_have_no_effect():
    words = "vllm_mode, vllm_probe_syncs: without use_vllm=True no vLLM engine"
    with pytest.warns(UserWarning, match=words):
        make(vllm_mode="server", vllm_probe_syncs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(vllm_max_logp_gap=0.5, vllm_importance_sampling_mode="token_mask")
        make(use_vllm=True, vllm_probe_syncs=3)


# --- The correction of engines, and tools ---


@KINDS
def test_defaults_of_the_correction(tmp_path, kind):
    args = config(tmp_path, kind)
    assert args.vllm_importance_sampling_correction is True
    assert [getattr(args, name) for name in (MODE, LOW, HIGH)] == ["sequence_mask", None, 3.0]
    assert (args.vllm_max_logp_gap, args.vllm_logp_gap_action) == (None, "raise")


@KINDS
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({MODE: "mask"}, f"{MODE}='mask' must be one of {', '.join(MODES)}"),
        ({LOW: 3.0}, f"{LOW}=3.0 must be below {HIGH}=3.0"),
        ({LOW: -0.1}, f"{LOW}=-0.1 must be at least 0"),
        ({HIGH: 0.0}, f"{HIGH}=0.0 must be above 0 .None: no bound."),
        ({"vllm_max_logp_gap": 0.0}, "vllm_max_logp_gap=0.0 must be above 0 .None: no bound."),
        (
            {"vllm_logp_gap_action": "skip"},
            "vllm_logp_gap_action='skip' must be one of warn, raise",
        ),
    ],
)
def test_errors_name_the_option_and_legal_values(tmp_path, kind, changes, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, kind, **changes)


@pytest.mark.parametrize("mode", MODES)
def test_truncation_needs_a_bound_and_masking_does_not(tmp_path, mode):
    bounds = {MODE: mode, HIGH: None}
    if mode.endswith("_mask"):
        assert getattr(config(tmp_path, **bounds), HIGH) is None
        return
    with pytest.raises(ValueError, match=f"needs a bound: set {HIGH}"):
        config(tmp_path, **bounds)
    config(tmp_path, **bounds, vllm_importance_sampling_correction=False)
    assert getattr(config(tmp_path, **bounds, **{LOW: 0.5}), LOW) == 0.5


@KINDS
def test_cap_is_an_old_name_of_the_upper_bound(tmp_path, kind):
    with pytest.warns(FutureWarning, match=f"vllm_importance_sampling_cap is now {HIGH}"):
        args = config(tmp_path, kind, vllm_importance_sampling_cap=2.0)
    assert getattr(args, HIGH) == 2.0
