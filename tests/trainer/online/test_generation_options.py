import pytest
from online_runs import config

from trl.ops.policy_losses import MODES, RatioBounds
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.rloo_config import RLOOConfig

KINDS = pytest.mark.parametrize("kind", [RLOOConfig, GRPOConfig])
MODE, HIGH = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
LOW = "vllm_importance_sampling_clip_min"


@KINDS
def test_defaults(tmp_path, kind):
    args = config(tmp_path, kind)
    assert args.vllm_importance_sampling_correction is True
    assert args.ratio_bounds == RatioBounds("sequence_mask", None, 3.0)
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
        assert config(tmp_path, **bounds).ratio_bounds == RatioBounds(mode, None, None)
        return
    with pytest.raises(ValueError, match=f"needs a bound: set {HIGH}"):
        config(tmp_path, **bounds)
    config(tmp_path, **bounds, vllm_importance_sampling_correction=False)
    assert config(tmp_path, **bounds, **{LOW: 0.5}).ratio_bounds == RatioBounds(mode, 0.5, None)


@KINDS
def test_cap_is_an_old_name_of_the_upper_bound(tmp_path, kind):
    with pytest.warns(FutureWarning, match=f"vllm_importance_sampling_cap is now {HIGH}"):
        args = config(tmp_path, kind, vllm_importance_sampling_cap=2.0)
    assert getattr(args, HIGH) == 2.0


@pytest.mark.parametrize("kind", [RLOOConfig, GRPOConfig])
def test_defaults_of_tools(tmp_path, kind):
    args = config(tmp_path, kind)
    assert (args.max_tool_calling_iterations, args.tool_timeout) == (None, 60.0)
    assert config(tmp_path, kind, tool_timeout=None).tool_timeout is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations=-1 must be at least 0"),
        ({"tool_timeout": 0}, "tool_timeout=0 must be above 0 .None: no limit."),
    ],
)
def test_values_of_tools_out_of_range(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **change)
