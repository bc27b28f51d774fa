"""What one step of DPO computes, whatever the pairs are laid out like."""

import math

import pytest
import torch
from datasets import Dataset
from dpo_runs import (
    BOUND,
    PAIRS,
    by_hand,
    config,
    gradient_of,
    make_trainer,
    other_model,
    pairs,
)
from peft import LoraConfig
from sft_runs import logged, relative, weights
from tiny import save_tiny, tiny_model, tiny_tokenizer

from trl.trainer.dpo_trainer import DPOTrainer

SPLITS = {
    "one micro-batch": {},
    "single pairs": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "three, three, two": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "padded rows": {"shared_prefix": False},
    "padded to 16, in twos": {
        "shared_prefix": False,
        "pad_to_multiple_of": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "token budget": {"max_tokens_per_micro_batch": 40, "gradient_accumulation_steps": 8},
    "shuffled": {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "tiles of logits": {"logits_chunk_size": 64},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def reference():
    return by_hand(tiny_model(), other_model())


@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradient_are_those_of_separate_rows(tmp_path, reference, split):
    trainer = make_trainer(tmp_path, ref_model=other_model(), **SPLITS[split])
    assert relative(gradient_of(trainer), reference[1]) <= BOUND
    assert trainer.state.log_history[0]["loss"] == pytest.approx(reference[0], rel=1e-6)
    assert trainer.state.global_step == 1
    rewards = 0.1 * reference[2]
    expected = {
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean(),
        "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).float().mean(),
        "rewards/ties": 0.0,
        "logps/chosen": reference[3][:, 0].mean(),
        "logps/rejected": reference[3][:, 1].mean(),
    }
    for name, value in expected.items():
        assert logged(trainer, name) == [pytest.approx(float(value), rel=1e-4, abs=1e-6)], name


LOSSES = {
    "cDPO": ("smoothed", {"label_smoothing": 0.1}, {}),
    "hinge": ("hinge", {"loss_type": "hinge"}, {}),
    "ipo": ("ipo", {"loss_type": ["ipo"]}, {}),
    "exo_pair": ("exo_pair", {"loss_type": "exo_pair", "label_smoothing": 0.1}, {}),
    "nca_pair": ("nca_pair", {"loss_type": "nca_pair"}, {}),
    "robust": ("robust", {"loss_type": "robust", "label_smoothing": 0.1}, {}),
    "bco_pair": ("bco_pair", {"loss_type": "bco_pair"}, {}),
    "sppo_hard": ("sppo_hard", {"loss_type": "sppo_hard"}, {}),
    "aot": ("aot", {"loss_type": "aot", "label_smoothing": 0.1}, {}),
    "aot_unpaired": ("aot_unpaired", {"loss_type": "aot_unpaired", "label_smoothing": 0.1}, {}),
    "apo_zero": ("apo_zero", {"loss_type": "apo_zero"}, {}),
    "apo_down": ("apo_down", {"loss_type": "apo_down"}, {}),
    "discopop": ("discopop", {"loss_type": "discopop"}, {}),
    "sigmoid_norm": ("sigmoid_norm", {"loss_type": "sigmoid_norm"}, {}),
    "sft": (None, {"loss_type": "sft"}, {"nll": 1.0}),
    "rpo": ("sigmoid", {"rpo_alpha": 0.5}, {"nll": 0.5}),
    "ld": ("sigmoid", {"ld_alpha": 0.3}, {"alpha": 0.3}),
    "wpo": ("sigmoid", {"use_weighting": True}, {"weighting": True}),
    "wpo with sft": (
        "sigmoid",
        {"use_weighting": True, "loss_type": ["sigmoid", "sft"]},
        {"weighting": True, "nll": 1.0},
    ),
    "forward_kl": (
        "sigmoid",
        {"f_divergence_type": "forward_kl"},
        {"divergence": lambda x: 1 - torch.exp(-x)},
    ),
    "alpha": (
        "ipo",
        {"loss_type": "ipo", "f_divergence_type": "alpha_divergence"},
        {"divergence": lambda x: (torch.exp(-0.5 * x) - 1) / -0.5},
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_each_loss_in_several_micro_batches(tmp_path, case):
    name, options, known = LOSSES[case]
    expected = by_hand(tiny_model(), other_model(), name, **known)
    split = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    trainer = make_trainer(tmp_path, ref_model=other_model(), **split, **options)
    assert relative(gradient_of(trainer), expected[1]) <= BOUND
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-5)]


def test_several_losses_are_added_up(tmp_path):
    names, factors = ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]
    parts = [
        by_hand(tiny_model(), other_model(), name, nll=float(name == "sft"))
        if name != "sft"
        else by_hand(tiny_model(), other_model(), None, nll=1.0)
        for name in names
    ]
    expected = sum(factor * part[1] for factor, part in zip(factors, parts, strict=True))
    options = {"loss_type": names, "loss_weights": factors, "per_device_train_batch_size": 4}
    trainer = make_trainer(
        tmp_path, ref_model=other_model(), **options, gradient_accumulation_steps=2
    )
    assert relative(gradient_of(trainer), expected) <= BOUND


def test_without_a_reference(tmp_path):
    expected = by_hand(tiny_model(), None)
    trainer = make_trainer(tmp_path, reference_free=True)
    assert trainer.reference is None
    assert relative(gradient_of(trainer), expected[1]) <= BOUND


def test_at_first_nothing_has_moved(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=pairs(), per_device_train_batch_size=8)
    found = trainer.evaluate()
    trainer.train()
    for logs, prefix in ((found, "eval_"), (trainer.state.log_history[0], "")):
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
            assert logs[prefix + name] == 0.0, name
        assert logs[f"{prefix}rewards/ties"] == 1.0 and logs[f"{prefix}rewards/accuracies"] == 0.0
        assert logs[f"{prefix}loss"] == pytest.approx(math.log(2), abs=1e-6)
    after = trainer.evaluate()
    assert after["eval_rewards/margins"] > 0 and after["eval_loss"] < math.log(2)


def test_evaluation_of_the_training_pairs_gives_the_training_loss(tmp_path):
    """For any size of the batches, as the likelihood is averaged over the tokens of all pairs."""
    expected = by_hand(tiny_model(), other_model(), nll=0.5)
    trainer = make_trainer(
        tmp_path,
        ref_model=other_model(),
        eval_dataset={"short": pairs(PAIRS[:3]), "all": pairs()},
        per_device_eval_batch_size=3,
        rpo_alpha=0.5,
    )
    found = trainer.evaluate()
    assert found["eval_all_loss"] == pytest.approx(expected[0], rel=1e-6)
    rewards = 0.1 * expected[2]
    for name, rows in (("short", rewards[:3]), ("all", rewards)):
        margin = float((rows[:, 0] - rows[:, 1]).mean())
        assert found[f"eval_{name}_rewards/margins"] == pytest.approx(margin, rel=1e-4)
    trainer.train()
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-6)]


def test_predictions_are_of_every_row_under_its_number(tmp_path):
    _, _, ratios, logps = by_hand(tiny_model(), other_model())
    trainer = make_trainer(tmp_path, ref_model=other_model(), per_device_eval_batch_size=3)
    found = trainer.predict(pairs())
    assert torch.as_tensor(found.predictions["rewards"]).allclose(0.1 * ratios, atol=1e-5)
    assert torch.as_tensor(found.predictions["logps"]).allclose(logps, atol=1e-4)
    assert 0 <= found.metrics["test_mean_token_accuracy"] <= 1


def test_lora_compares_with_the_model_without_it(tmp_path):
    peft_config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path, peft_config=peft_config, learning_rate=5.0, max_steps=6)
    before = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    losses, margins = logged(trainer, "loss"), logged(trainer, "rewards/margins")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and margins[0] == 0.0
    assert losses[-1] < losses[0] - 0.02 and margins[-1] > 0.05
    now = dict(trainer.model.named_parameters())
    assert before and all(torch.equal(now[name], value) for name, value in before.items())


def test_a_reference_that_moves(tmp_path):
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    trainer = make_trainer(tmp_path, max_steps=3, **options)
    trainer.train()
    margins = logged(trainer, "rewards/margins")
    assert margins[0] == 0.0 and margins[1] > 0 and margins[2] == pytest.approx(0.0, abs=1e-6)


def test_what_runs_out_of_memory_is_computed_in_pieces(tmp_path, reference):
    """With and without gradient; the same gradient from fewer pairs at a time."""
    trainer = make_trainer(tmp_path, ref_model=other_model())
    sizes, loss, score_frozen = [], trainer.loss, trainer.scorer.frozen_scores

    def check(pairs):
        sizes.append((torch.is_grad_enabled(), pairs))
        if pairs > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def narrow_loss(scores, batch):
        check(len(batch.groups))
        return loss(scores, batch)

    def narrow_scores(model, rows, *options):
        check(len(rows) // 2)
        return score_frozen(model, rows, *options)

    trainer.loss, trainer.scorer.frozen_scores = narrow_loss, narrow_scores
    assert relative(gradient_of(trainer), reference[1]) <= BOUND
    for mode in (True, False):
        found = [size for grad, size in sizes if grad == mode]
        assert max(found) == 8 and sum(size for size in found if size <= 3) == 8


def test_a_resumed_run_ends_as_one_that_went_on(tmp_path):
    """Bit for bit, with a reference that moved before the checkpoint was written."""
    settings = {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    }

    def run(folder, checkpoint=None):
        trainer = make_trainer(folder, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights(trainer.model), logged(trainer, "rewards/margins")

    alone = run(tmp_path / "alone")
    again = run(tmp_path / "again", str(tmp_path / "alone" / "checkpoint-3"))
    assert torch.equal(again[0], alone[0]) and again[1] == alone[1]


def test_messages_with_tools_and_what_is_refused(tmp_path):
    user, good = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    bad = good | {"content": "no"}
    chat = {"chosen": [[user, good]], "rejected": [[user, bad]], "tools": [None]}
    trainer = make_trainer(tmp_path, Dataset.from_dict(chat))
    item = trainer.train_dataset[0]
    decoded = [
        tiny_tokenizer().decode(ids)
        for ids in [item[f"{x}_ids"] for x in ("prompt", "chosen", "rejected")]
    ]
    assert decoded == ["<user>hi<end><assistant>", "yes<end>", "no<end>"]
    with pytest.raises(NotImplementedError, match="train_dataset has the column 'images'"):
        make_trainer(tmp_path, Dataset.from_dict(chat | {"images": [[]]}))
    for name in ("data_collator", "compute_metrics"):
        with pytest.raises(ValueError, match=f"{name} cannot be used"):
            DPOTrainer(
                tiny_model(),
                args=config(tmp_path),
                train_dataset=pairs(),
                processing_class=tiny_tokenizer(),
                **{name: len},
            )


def test_a_model_by_name_is_saved_with_a_card(tmp_path):
    name = save_tiny(tmp_path / "base")
    trainer = DPOTrainer(name, name, config(tmp_path / "run"), train_dataset=pairs())
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "2305.18290" in card and "- dpo" in card and "rafailov2023direct" in card
    assert logged(trainer, "rewards/margins") == [0.0]
