"""What trainers make of plain `transformers.TrainingArguments`."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from bad_inputs import LABELLED, PAIRS, rows
from reward_runs import classifier
from tiny import tiny_model, tiny_tokenizer
from transformers import Seq2SeqTrainingArguments, TrainingArguments

import trl
from trl.trainer.base.plain_arguments import config_of

SET = {
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.125,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "weight_decay": 0.5,
    "seed": 7,
    "logging_steps": 3,
    "gradient_accumulation_steps": 2,
}
DATA = {"SFT": rows(text="abc"), "DPO": PAIRS, "KTO": LABELLED, "Reward": PAIRS}


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def make_trainer(name, args):
    others = {} if name in DATA else {"reward_funcs": length}
    return getattr(trl, f"{name}Trainer")(
        model=classifier() if name == "Reward" else tiny_model(max_position_embeddings=1024),
        args=args,
        processing_class=tiny_tokenizer(),
        train_dataset=DATA.get(name, rows(16, prompt="ab")),
        **others,
    )


@pytest.mark.parametrize(
    "name", ["SFT", "DPO", "KTO", "Reward", "RLOO", "GRPO", "OnlineDPO", "PPO"]
)
def test_what_is_set_is_kept_and_the_rest_is_the_trainers(tmp_path, name):
    changes = SET | ({"per_device_train_batch_size": 8} if name in ("RLOO", "GRPO") else {})
    plain = TrainingArguments(str(tmp_path), **changes)
    trainer = make_trainer(name, plain)
    kind = getattr(trl, f"{name}Config")
    assert type(trainer.args) is kind and trainer.args is not plain
    expected = kind(str(tmp_path), **changes)
    for field in dataclasses.fields(kind):
        assert getattr(trainer.args, field.name) == getattr(expected, field.name), field.name
    assert (trainer.args.weight_decay, trainer.args.output_dir) == (0.5, str(tmp_path))


@pytest.mark.parametrize("name", ["SFT", "DPO", "RLOO"])
def test_a_step_is_that_of_the_trainers_own_configuration(tmp_path, name):
    changes = SET | {"per_device_train_batch_size": 8, "learning_rate": 0.5, "max_grad_norm": 0.25}
    weights = []
    for kind in (TrainingArguments, getattr(trl, f"{name}Config")):
        trainer = make_trainer(name, kind(str(tmp_path), **changes))
        before = [weight.detach().clone() for weight in trainer.model.parameters()]
        trainer.train()
        assert trainer.state.global_step == 1
        weights.append([weight.detach().clone() for weight in trainer.model.parameters()])
        moved = [not torch.equal(*pair) for pair in zip(before, weights[-1], strict=True)]
        assert any(moved)
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_defaults_and_what_transformers_derives_are_not_set(tmp_path):
    plain = TrainingArguments(str(tmp_path), use_cpu=True, eval_strategy="steps")
    assert plain.eval_steps == 500
    config = config_of(plain, trl.SFTConfig)
    own = trl.SFTConfig(str(tmp_path), use_cpu=True, eval_strategy="steps")
    assert (config.learning_rate, config.logging_steps) == (own.learning_rate, 10)
    assert config.eval_steps == own.eval_steps == 10
    chosen = TrainingArguments(str(tmp_path), use_cpu=True, eval_strategy="steps", eval_steps=30)
    assert config_of(chosen, trl.SFTConfig).eval_steps == 30


@dataclass
class WithAnOption(TrainingArguments):
    margin: float = 1.0


def test_options_that_the_configuration_lacks_are_an_error(tmp_path):
    plain = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, seed=3)
    assert config_of(plain, trl.DPOConfig).seed == 3
    assert config_of(WithAnOption(str(tmp_path), use_cpu=True), trl.DPOConfig).seed == 42
    with pytest.raises(TypeError, match="DPOConfig has no argument 'margin'"):
        config_of(WithAnOption(str(tmp_path), use_cpu=True, margin=2.0), trl.DPOConfig)


def test_what_a_trainer_cannot_use_is_refused(tmp_path):
    plain = TrainingArguments(str(tmp_path), use_cpu=True, neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match="neftune_noise_alpha=5.0 cannot be used"):
        make_trainer("RLOO", plain)
