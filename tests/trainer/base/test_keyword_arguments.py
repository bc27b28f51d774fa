"""Misspelled names and old names of options and arguments."""

import copy
import dataclasses
import inspect
import pickle
import re
import warnings
from abc import ABC

import pytest
from datasets import Dataset
from online_runs import config, token_sum
from tiny import tiny_model, tiny_tokenizer

from trl.trainer.base.keyword_arguments import RemovedOption
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.online_dpo_trainer import OnlineDPOTrainer
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

REMOVED = {
    name: new for name, new in RLOOConfig.legacy_options.items() if isinstance(new, RemovedOption)
}


def make(kind=RLOOConfig, **changes):
    return kind("out", use_cpu=True, report_to="none", **changes)


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("rloo_k", 4, "num_generations", 4),
        ("cliprange", 0.3, "epsilon", 0.3),
        ("kl_coef", 0.1, "beta", 0.1),
        ("exp_name", "run", "run_name", "run"),
        ("normalize_reward", True, "normalize_advantages", True),
        ("num_ppo_epochs", 4, "num_iterations", 4),
        ("response_length", 53, "max_completion_length", 53),
        ("vllm_sleep_enabled", True, "vllm_enable_sleep_mode", True),
        ("vllm_guided_decoding_regex", "a+", "vllm_structured_outputs_regex", "a+"),
        ("wandb_log_unique_prompts", True, "log_unique_prompts", True),
    ],
)
def test_renamed_options(old, value, new, expected):
    with pytest.warns(FutureWarning, match=f"{old} is now {new}"):
        assert getattr(make(**{old: value}), new) == expected


def test_one_warning_names_every_key():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(rloo_k=4, kl_coef=0.1, token_level_kl=True)
    messages = [str(w.message) for w in caught if "rloo_k" in str(w.message)]
    assert len(messages) == 1
    for words in ("rloo_k is now num_generations", "kl_coef is now beta", "token_level_kl has no"):
        assert words in messages[0]


@pytest.mark.parametrize("name", [name for name, option in REMOVED.items() if not option.is_error])
def test_options_without_effect(name):
    with pytest.warns(FutureWarning, match=f"{name} has no effect"):
        make(**{name: 1})


@pytest.mark.parametrize("name", [name for name, option in REMOVED.items() if option.is_error])
def test_removed_options_say_what_to_use(name):
    message = f"{name}=1 is no option of RLOOConfig any more: {REMOVED[name].advice}"
    with pytest.raises(TypeError, match=message):
        make(**{name: 1})


def test_both_names_are_an_error():
    with pytest.raises(ValueError, match="RLOOConfig: both kl_coef and beta"):
        make(kl_coef=0.1, beta=0.1)


def test_mini_batches_count_updates_for_each_rollout():
    with pytest.warns(FutureWarning):
        found = make(num_mini_batches=3, gradient_accumulation_steps=2, num_generations=2)
    assert found.steps_per_generation == 6, "3 updates of 2 micro-batches"


def test_episodes_count_completions():
    with pytest.warns(FutureWarning, match="max_steps"):
        once = make(total_episodes=1000, gradient_accumulation_steps=2)
    assert once.max_steps == 63, "ceil(1000 / (8 x 2))"
    with pytest.warns(FutureWarning):
        twice = make(total_episodes=1000, gradient_accumulation_steps=2, num_iterations=2)
    assert twice.max_steps == 125


def test_unset_old_options_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        make(rloo_k=None)


def test_what_both_trainers_had_is_known_to_both():
    with pytest.warns(FutureWarning, match="use_liger_loss has no effect"):
        assert make(GRPOConfig, use_liger_loss=True, wandb_log_unique_prompts=True)
    assert make(GRPOConfig, max_prompt_length=512).long_prompts == "error", "none is cut silently"
    assert make(GRPOConfig, top_k=None).top_k == 0


def test_tokenized_datasets_are_decoded(tmp_path):
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text)["input_ids"] for text in ("ab", "cd", "ef", "gh")]
    data = Dataset.from_dict({"input_ids": ids})
    with pytest.warns(FutureWarning, match="input_ids is decoded"):
        trainer = RLOOTrainer(
            tiny_model(),
            token_sum,
            config(tmp_path),
            train_dataset=data,
            processing_class=tokenizer,
        )
    assert trainer.train_dataset["prompt"] == ["ab", "cd", "ef", "gh"]
    with pytest.raises(ValueError, match="processing_class"):
        RLOOTrainer(tiny_model(), token_sum, config(tmp_path), train_dataset=data)


def test_old_names_of_trainer_arguments(tmp_path):
    with pytest.warns(FutureWarning, match="config is now args; reward_model is now reward_funcs"):
        trainer = RLOOTrainer(
            tiny_model(),
            config=config(tmp_path),
            reward_model=token_sum,
            train_dataset=Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"]}),
            processing_class=tiny_tokenizer(),
        )
    assert trainer.args.num_generations == 4


# --- Names that a constructor does not have ---


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (
            SFTConfig,
            "max_lenght",
            "SFTConfig has no argument 'max_lenght'. Did you mean max_length",
        ),
        (
            SFTConfig,
            "group_by_length",
            "no argument 'group_by_length'. Did you mean train_sampling",
        ),
        (KTOConfig, "max_seq_length", "KTOConfig has no argument 'max_seq_length'. Did you mean"),
        (RLOOTrainer, "tokenizer", "RLOOTrainer has no argument 'tokenizer'. Did you mean proc"),
        # These hand on what they do not name.
        (DPOTrainer, "train_datset", "DPOTrainer has no argument 'train_datset'. Did you mean"),
        (KTOTrainer, "refmodel", "KTOTrainer has no argument 'refmodel'. Did you mean ref_model"),
        (PPOTrainer, "valuemodel", "PPOTrainer has no argument 'valuemodel'. Did you mean value"),
        (OnlineDPOTrainer, "judges", "OnlineDPOTrainer has no argument 'judges'. Did you mean jud"),
    ],
)
def test_mistyped_names_are_refused_with_the_one_that_is_meant(kind, name, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        kind("model", **{name: None})


def test_a_subclass_may_take_keywords_that_it_does_not_name():
    class Mine(SFTTrainer, ABC):
        def __init__(self, model, **options):
            self.mine = options.pop("mine")
            super().__init__(model, **options)

    with pytest.raises(ValueError, match="train_dataset is required"):
        Mine("model", mine=1)
    with pytest.raises(TypeError, match="'train_datset'. Did you mean train_dataset"):
        Mine("model", mine=1, train_datset=None)


def test_constructors_show_their_arguments():
    assert list(inspect.signature(DPOTrainer).parameters)[:3] == ["model", "ref_model", "args"]
    names = [field.name for field in dataclasses.fields(SFTConfig) if field.init]
    assert list(inspect.signature(SFTConfig).parameters) == names


def test_configurations_are_copied():
    config = make(SFTConfig, max_length=7)
    for found in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert found.to_dict() == config.to_dict()
    assert dataclasses.replace(config, max_length=8).max_length == 8
