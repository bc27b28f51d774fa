"""Names under which scripts and callbacks of Hugging Face TRL read a trainer."""

import dpo_runs
import kto_runs
import pytest
import reward_runs
import sft_runs
from online_runs import make_trainer, token_sum
from tiny import tiny_model

import trl
from trl.trainer import attributes

# What each trainer has besides what all of them have: options of its own, and what they became.
SAMPLED = {
    *("num_generations", "num_generations_eval", "num_iterations", "max_completion_length"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
    *("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    *("use_transformers_continuous_batching", "continuous_batching_config"),
    *("mask_truncated_completions", "log_completions", "log_multimodal", "log_unique_prompts"),
    *("num_completions_to_print", "max_tool_calling_iterations", "chat_template_kwargs"),
    *("epsilon_low", "epsilon_high", "eos_token_ids", "generation_config", "tools"),
    *("reward_funcs", "reward_func_names", "reward_weights", "reward_processing_classes"),
    *("rollout_func", "beta", "shuffle_dataset"),
}
PREFERENCES = {"beta", "loss_type", "precompute_ref_logps", "padding_free", "shuffle_dataset"}
OF_ALL = {"ref_model", "router_aux_loss_coef", "aux_loss_enabled", "pad_to_multiple_of"}
NAMES = {
    "SFT": {"padding_free", "completion_only_loss", "loss_type", "shuffle_dataset"},
    "DPO": PREFERENCES
    | {"f_divergence_type", "f_alpha_divergence_coef", "label_smoothing", "ld_alpha"}
    | {"use_weighting", "loss_types", "loss_weights"},
    "KTO": PREFERENCES | {"desirable_weight", "undesirable_weight", "calculate_KL"},
    "Reward": {"padding_free", "shuffle_dataset"},
    "RLOO": SAMPLED | {"normalize_advantages", "reward_clip_range"},
    "GRPO": SAMPLED
    | {"loss_type", "scale_rewards", "importance_sampling_level", "use_adaptive_entropy"}
    | {"multi_objective_aggregation", "off_policy_mask_threshold", "top_entropy_quantile"}
    | {"entropy_coef"},
    "OnlineDPO": SAMPLED | {"loss_type"},
    "PPO": SAMPLED,
}
ALL_NAMES = {
    *attributes.ONLINE_OPTIONS,
    *attributes.ONLINE_PROPERTIES,
    *attributes.OFFLINE_OPTIONS,
    *attributes.PREFERENCE_OPTIONS,
    *attributes.PREFERENCE_PROPERTIES,
}
OFFLINE = {"SFT": sft_runs, "DPO": dpo_runs, "KTO": kto_runs, "Reward": reward_runs}


def make(name, folder, **changes):
    if name in OFFLINE:
        return OFFLINE[name].make_trainer(folder, **changes)
    if name == "OnlineDPO":
        changes = {"num_generations": 2, "per_device_train_batch_size": 4} | changes
    return make_trainer(folder, getattr(trl, f"{name}Trainer"), beta=0.1, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_read_and_none_set(tmp_path, name):
    trainer = make(name, tmp_path)
    readable = {attribute for attribute in ALL_NAMES if hasattr(trainer, attribute)}
    expected = NAMES[name] | OF_ALL
    assert readable >= expected
    computed = attributes.ONLINE_PROPERTIES.keys() | attributes.PREFERENCE_PROPERTIES.keys()
    assert all(hasattr(trainer.args, attribute) for attribute in readable - computed)
    for attribute in expected:
        with pytest.raises(AttributeError):
            setattr(trainer, attribute, None)


@pytest.mark.parametrize("name", ["SFT", "Reward"])
def test_trainers_have_no_properties_of_other_kinds_of_trainers(name):
    trainer_class = getattr(trl, f"{name}Trainer")
    of_preferences = {*attributes.PREFERENCE_OPTIONS, *attributes.PREFERENCE_PROPERTIES}
    online = {*attributes.ONLINE_OPTIONS, *attributes.ONLINE_PROPERTIES}
    own = {*attributes.OFFLINE_OPTIONS, *attributes.COMMON_PROPERTIES}
    assert not [
        attribute
        for attribute in (of_preferences | online) - own
        if hasattr(trainer_class, attribute)
    ]
    assert not hasattr(trl.DPOTrainer, "rollout_func") and hasattr(trl.DPOTrainer, "beta")


def test_what_trainers_of_preferences_say(tmp_path):
    options = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    dpo = make("DPO", tmp_path, **options)
    assert (dpo.loss_types, dpo.loss_weights) == (["sigmoid", "sft"], [1.0, 0.5])
    assert dpo.beta == 0.1 and dpo.ref_model is dpo.reference.model
    assert dpo.precompute_ref_logps is False and dpo.label_smoothing == 0.0
    kto = make("KTO", tmp_path, desirable_weight=2.0)
    assert kto.calculate_KL is True and kto.desirable_weight == 2.0
    assert make("KTO", tmp_path, loss_type="apo_zero_unpaired").calculate_KL is False
    assert make("SFT", tmp_path).ref_model is None


def test_what_they_say(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1, num_generations_eval=2, epsilon=0.3, temperature=0.5)
    assert (trainer.beta, trainer.num_generations, trainer.num_generations_eval) == (0.1, 4, 2)
    assert trainer.epsilon_low == trainer.epsilon_high == 0.3
    assert trainer.reward_funcs == [token_sum] and trainer.reward_func_names == ["token_sum"]
    assert trainer.reward_weights.tolist() == [1.0]
    assert trainer.reward_processing_classes == [None]
    assert trainer.ref_model is trainer.reference.model
    assert trainer.tools == [] and trainer.rollout_func is None
    assert trainer.chat_template_kwargs == trainer.generation_kwargs == {}
    config = trainer.generation_config
    assert (config.max_new_tokens, config.temperature, config.do_sample) == (8, 0.5, True)
    assert config.eos_token_id == trainer.eos_token_ids == [1]
    assert (trainer.router_aux_loss_coef, trainer.aux_loss_enabled) == (0.0, False)


def test_without_a_reference_of_its_own_there_is_no_model(tmp_path):
    assert make_trainer(tmp_path, model=tiny_model(), beta=0.0).ref_model is None
