"""Names under which scripts and callbacks of Hugging Face TRL read a trainer."""

import pytest
from online_runs import make_trainer, token_sum
from tiny import tiny_model

from trl.trainer.attributes import OPTIONS, OTHERS
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

OF_ONE = {
    RLOOTrainer: {"normalize_advantages", "reward_clip_range"},
    GRPOTrainer: {
        *("loss_type", "scale_rewards", "importance_sampling_level", "use_adaptive_entropy"),
        *("multi_objective_aggregation", "off_policy_mask_threshold", "top_entropy_quantile"),
        "entropy_coef",
    },
}


@pytest.mark.parametrize("kind", [RLOOTrainer, GRPOTrainer])
def test_every_name_can_be_read_and_none_set(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind, beta=0.1)
    (others,) = [names for other, names in OF_ONE.items() if other is not kind]
    for name in (*OPTIONS, *OTHERS):
        assert hasattr(trainer, name) == (name not in others), name
        with pytest.raises(AttributeError):
            setattr(trainer, name, None)


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
