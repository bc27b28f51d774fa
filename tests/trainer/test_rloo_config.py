import dataclasses

import pytest

from trl.trainer.rloo_config import RLOOConfig


def make(**changes) -> RLOOConfig:
    return RLOOConfig("out", use_cpu=True, report_to="none", **changes)


def test_defaults_of_the_contract():
    config = make()
    expected = {
        "learning_rate": 1e-6, "num_generations": 2, "num_generations_eval": None,
        "max_completion_length": 512, "beta": 0.05, "epsilon": 0.2, "epsilon_high": None,
        "num_iterations": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "gradient_checkpointing": True, "bf16": True,
        "logging_steps": 10, "remove_unused_columns": False, "shuffle_dataset": True,
        "disable_dropout": False, "ds3_gather_for_generation": True, "use_vllm": False,
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": None, "vllm_group_port": 51216,
        "mask_truncated_completions": False, "normalize_advantages": False,
        "reward_clip_range": None, "reward_weights": None, "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "log_completions": False,
        "pad_to_multiple_of": None, "per_device_train_batch_size": 8, "num_train_epochs": 3.0,
        "vllm_server_timeout": 240.0, "router_aux_loss_coef": None, "steps_per_generation": 1,
        "generation_batch_size": 8,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_fp16_switches_bf16_off():
    assert RLOOConfig("out", use_cpu=True, report_to="none", fp16=True).bf16 is False


def test_rebuilt_configurations_are_equal():
    config = make(gradient_accumulation_steps=4, num_generations=4, reward_clip_range=(-1, 1))
    assert dataclasses.replace(config, learning_rate=1e-3).steps_per_generation == 4
    again = RLOOConfig(**config.to_dict())
    assert again.to_dict() == config.to_dict()


def test_json_strings_become_dictionaries():
    config = make(generation_kwargs='{"top_k": 5}', model_init_kwargs='{"dtype": "float32"}')
    assert config.generation_kwargs == {"top_k": 5}
    assert config.model_init_kwargs == {"dtype": "float32"}


def test_pad_multiple_spellings():
    found = [make(pad_to_multiple_of=text).pad_to_multiple_of for text in ("none", "8", 16, "auto")]
    assert found == [None, 8, 16, None]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_generations": 0}, "num_generations=0"),
        ({"num_generations": 3}, "num_generations=2 or 4, or generation_batch_size=24"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"temperature": 0.0}, "do_sample"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"non_finite": "zero"}, "one of raise, skip"),
        ({"vllm_mode": "both"}, "one of colocate, server"),
        ({"sync_ref_model": True, "beta": 0.0}, "set beta above 0"),
        ({"reward_clip_range": 10.0}, r"reward_clip_range=\(-10, 10\)"),
        ({"reward_clip_range": (1, -1)}, "lowest then highest"),
        ({"eval_strategy": "epoch", "num_generations_eval": 3}, "per_device_eval_batch_size"),
        ({"max_completion_length": 0}, "at least 1"),
    ],
)
def test_errors_name_option_and_remedy(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_paged_is_an_old_name():
    with pytest.warns(FutureWarning, match="use_transformers_continuous_batching"):
        assert make(use_transformers_paged=True).use_transformers_continuous_batching
