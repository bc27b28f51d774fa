import dataclasses
import warnings

import pytest

from trl.ops.policy_losses import MODES
from trl.trainer.grpo_config import LOSS_TYPES, GRPOConfig


def make(**changes) -> GRPOConfig:
    return GRPOConfig("out", use_cpu=True, report_to="none", **changes)


def test_defaults_of_the_contract():
    expected = {
        "num_generations": 8, "beta": 0.0, "learning_rate": 1e-6, "max_completion_length": 512,
        "scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize",
        "loss_type": "dapo", "importance_sampling_level": "token", "delta": None,
        "use_bias_correction_kl": True, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0,
        "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
        "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
        "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0,
        "entropy_coef_delta": 0.005, "entropy_target": 0.2, "max_tool_calling_iterations": None,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
        "log_completions_hub_repo": None,
        "cast_lm_head_to_fp32": False, "epsilon": 0.2, "epsilon_high": None,
    }  # fmt: skip
    config = make()
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        (True, "group"),
        (False, "none"),
        ("True", "group"),
        ("false", "none"),
        ("None", "none"),
        ("batch", "batch"),
        ("GROUP", "group"),
    ],
)
def test_spellings_of_scale_rewards(given, settled):
    assert make(scale_rewards=given).scale_rewards == settled


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("loss_type", LOSS_TYPES),
        ("importance_sampling_level", ("token", "sequence")),
        ("multi_objective_aggregation", ("sum_then_normalize", "normalize_then_sum")),
        ("scale_rewards", ("group", "batch", "none")),
    ],
)
def test_names_are_checked_at_construction(name, legal):
    for value in legal:
        assert getattr(make(**{name: value}), name) == value
    with pytest.raises(ValueError, match=f"{name}='other' must be one of {', '.join(legal)}"):
        make(**{name: "other"})


@pytest.mark.parametrize("name", ["loss_type", "importance_sampling_level"])
def test_the_command_line_offers_the_names_the_check_accepts(name):
    field = next(field for field in dataclasses.fields(GRPOConfig) if field.name == name)
    for choice in field.metadata["choices"]:
        assert getattr(make(**{name: choice}), name) == choice


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0 must be above 0"),
        ({"top_entropy_quantile": 1.1}, "top_entropy_quantile=1.1 must be above 0 and at most 1"),
        (
            {"entropy_coef_min": 0.5, "entropy_coef_max": 0.4},
            "entropy_coef_min=0.5 must not exceed entropy_coef_max=0.4",
        ),
        ({"num_generations": 1}, "num_generations=1"),
        ({"num_generations": 3}, "num_generations=2 or 4"),
    ],
)
def test_errors_name_option_and_remedy(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_uploading_completions_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="log_completions_hub_repo='me/rows' cannot be used"):
        make(log_completions_hub_repo="me/rows", log_completions=True)


@pytest.mark.parametrize("mode", MODES)
def test_vespo_is_corrected_by_tokens(mode):
    """With the default mode an engine that is not corrected, or none, can be used."""
    chosen = {"loss_type": "vespo", "vllm_importance_sampling_mode": mode}
    make(**chosen)
    make(**chosen, use_vllm=True, vllm_importance_sampling_correction=False)
    if mode.startswith("token"):
        make(**chosen, use_vllm=True)
        return
    with pytest.raises(ValueError, match=f"set it to 'token_{mode.split('_')[1]}'"):
        make(**chosen, use_vllm=True)


def test_sleep_option_is_an_old_name():
    with pytest.warns(FutureWarning, match="vllm_sleep_enabled is now vllm_enable_sleep_mode"):
        assert make(vllm_sleep_enabled=True).vllm_enable_sleep_mode is True


def test_rebuilt_configurations_are_equal_and_do_not_warn_again():
    with pytest.warns(FutureWarning):
        config = make(scale_rewards=False, vllm_importance_sampling_cap=2.0, loss_type="sapo")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        again = GRPOConfig(**config.to_dict())
        other = dataclasses.replace(config, beta=0.1)
    assert again.to_dict() == config.to_dict()
    assert (other.scale_rewards, other.beta, other.loss_type) == ("none", 0.1, "sapo")


@pytest.mark.parametrize(
    ("loss_type", "level", "usual"),
    [("dapo", "sequence", "token"), ("luspo", "token", "sequence"), ("vespo", "sequence", "token")],
)
def test_unusual_levels_are_named(loss_type, level, usual):
    words = f"loss_type='{loss_type}' .* importance_sampling_level='{usual}'"
    with pytest.warns(UserWarning, match=words):
        GRPOConfig(
            "out",
            use_cpu=True,
            report_to="none",
            loss_type=loss_type,
            importance_sampling_level=level,
        )
