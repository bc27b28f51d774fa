"""What one step of a reward model computes, against scores of rows computed one by one."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from reward_runs import (
    PAIRS,
    RANKED,
    as_pairs,
    by_hand,
    classifier,
    make_trainer,
    pairs,
    ranked,
    score,
)
from sft_runs import config, direction, logged, relative, weights
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import BertConfig, BertForSequenceClassification

from trl.online.reward_sources import resolve_rewards
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

SPLITS = {
    "one micro-batch": {},
    "single pairs": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
    "fours, twos": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "padded rows": {"shared_prefix": False},
    "padded to 16": {"shared_prefix": False, "pad_to_multiple_of": 16},
    "shuffled": {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
    },
    "token budget": {"max_tokens_per_micro_batch": 60, "gradient_accumulation_steps": 6},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def reference():
    return by_hand(classifier())


@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradient_are_those_of_rows_computed_singly(tmp_path, reference, split):
    trainer = make_trainer(tmp_path, **SPLITS[split])
    assert relative(direction(trainer), reference[1]) <= 5e-6
    (entry, *_) = trainer.state.log_history
    assert entry["loss"] == pytest.approx(reference[0], rel=1e-6)
    chosen, rejected = map(torch.tensor, zip(*reference[2], strict=True))
    assert entry["accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert entry["margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)
    every = torch.cat([chosen, rejected])
    assert entry["mean_reward"] == pytest.approx(float(every.mean()), rel=1e-4)
    assert entry["min_reward"] == pytest.approx(float(every.min()), rel=1e-4)
    assert entry["max_reward"] == pytest.approx(float(every.max()), rel=1e-4)
    once = sum(len(p) + sum(len(a) + 1 for a in answers) for p, *answers in PAIRS)
    assert entry["num_tokens"] == once


def test_no_gradient_of_the_vocabulary_is_held_before_the_last_piece(tmp_path):
    model, held = classifier(vocab_size=4000), []
    wanted = by_hand(classifier(vocab_size=4000))[1]
    table = model.get_input_embeddings().weight
    trainer = make_trainer(tmp_path, model=model, max_tokens_per_piece=8)
    hook = lambda *_: torch.is_grad_enabled() and held.append(table.grad is not None)  # noqa: E731
    model.model.register_forward_pre_hook(hook)
    assert relative(direction(trainer), wanted) <= 5e-6
    assert held == [False] * len(PAIRS)


def test_margins_and_centering(tmp_path):
    margins = [0.0, 0.5, 1.0, -0.3, 2.0, 0.1]
    expected = by_hand(classifier(), margins=margins, centering=0.05)
    trainer = make_trainer(tmp_path, pairs(margin=margins), center_rewards_coefficient=0.05)
    assert relative(direction(trainer), expected[1]) <= 5e-6
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-6)]
    margin = sum(c - r for c, r in expected[2]) / len(PAIRS)
    assert logged(trainer, "margin") == [pytest.approx(margin, rel=1e-4)]


@pytest.mark.parametrize("size", [1, 3])
def test_ranked_answers_train_on_all_their_pairs(tmp_path, size):
    """As a dataset of all pairs would, but each answer is computed once."""
    expected = by_hand(classifier(), as_pairs(RANKED), centering=0.01)
    trainer = make_trainer(
        tmp_path,
        ranked(),
        center_rewards_coefficient=0.01,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=3 // size,
    )
    seen = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    assert relative(direction(trainer), expected[1]) <= 5e-6
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-6)]
    once = sum(len(p) + sum(len(a) + 1 for a in answers) for p, answers, _ in RANKED)
    if size == 3:
        assert seen[-1] <= once


def test_a_loss_without_a_difference_is_ln_2(tmp_path):
    trainer = make_trainer(tmp_path, pairs([("a", "b", "b")]))
    trainer.train()
    assert logged(trainer, "loss") == [pytest.approx(math.log(2), abs=1e-6)]
    assert logged(trainer, "accuracy") == [0.0]


# --- Scores ---


def padded_with_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def padded_left():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer


# Ends in the midst of prompts and answers, tokens of padding, an answer that is its end alone.
UNUSUAL = [("a<eos>b", "c<eos>d", "c"), ("x", "<pad>y", "y<eos>z"), ("q<eos>", "", "<eos>a")]


def test_scores_depend_on_neither_padding_nor_batch(tmp_path):
    """Transformers itself reads another token where the token that ends texts fills padding."""
    model, rows = classifier(), [*PAIRS, *UNUSUAL]
    expected = torch.stack([score(model, p, a) for p, *both in rows for a in both]).detach()
    for tokenizer in (tiny_tokenizer(), padded_left(), padded_with_eos()):
        for changes in ({}, {"shared_prefix": False}, {"per_device_eval_batch_size": 1}):
            trainer = make_trainer(tmp_path, model=model, tokenizer=tokenizer, **changes)
            found = torch.as_tensor(trainer.predict(pairs(rows)).predictions).flatten()
            assert (found - expected).abs().max() <= 1e-5
    ids = [tiny_tokenizer()(p + a)["input_ids"] + [1] for p, *both in PAIRS for a in both]
    theirs = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in ids]).detach()
    # What pooling by the id of padding reads.
    assert (theirs - expected[: len(ids)]).abs().max() > 0.01


def chat(prompt, *answers):
    user = [{"role": "user", "content": prompt}]
    return [user, *([{"role": "assistant", "content": answer}] for answer in answers)]


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, padded_with_eos])
def test_a_saved_model_rewards_completions_with_the_same_scores(tmp_path, tokenizer):
    tokenizer = tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<end>", "<eos>")
    rows = [chat(*row) for row in PAIRS]
    trainer = make_trainer(tmp_path, pairs(rows), tokenizer=tokenizer)
    trainer.train()
    trainer.save_model()
    scores = torch.as_tensor(trainer.predict(pairs(rows)).predictions)
    (source,) = resolve_rewards(str(tmp_path))
    for column in (1, 2):
        found = source.score([row[0] for row in rows], [row[column] for row in rows])
        assert found == pytest.approx(scores[:, column - 1].tolist(), abs=1e-5)


def test_a_classifier_on_an_encoder_scores_with_its_own_forward(tmp_path):
    torch.manual_seed(0)
    settings = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 32, "intermediate_size": 64}
    settings |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    model = BertForSequenceClassification(BertConfig(**settings))
    trainer = make_trainer(tmp_path, model=model)
    ids = [tiny_tokenizer()(p + a)["input_ids"] + [1] for p, *both in PAIRS for a in both]
    model.eval()
    expected = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in ids]).detach()
    found = torch.as_tensor(trainer.predict(pairs()).predictions).flatten()
    assert (found - expected).abs().max() <= 1e-5
    before = weights(model)
    trainer.train()
    assert not torch.equal(weights(model), before)


# --- Data ---


def test_pairs_over_max_length_are_left_out(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("trl.data.cutting.logger.warning", said.append)
    trainer = make_trainer(tmp_path, max_length=20)
    assert len(trainer.train_dataset) == 4
    assert "2 of 6 rows longer than max_length=20:" in said[0]
    assert said[1:] == ["2 of 6 rows left with nothing to train on: 1, 3."]
    with pytest.raises(ValueError, match="max_length=2"):
        make_trainer(tmp_path, max_length=2)


# --- Adapters ---


@pytest.mark.parametrize("task", ["CAUSAL_LM", None, "SEQ_CLS"])
def test_an_adapter_is_trained_and_saved_with_the_layer_of_the_score(tmp_path, task):
    options = {} if task is None else {"task_type": task}
    peft_config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
    trainer = make_trainer(tmp_path, peft_config=peft_config, learning_rate=0.05, max_steps=6)
    before = classifier().score.weight
    trainer.train()
    trainer.save_model()
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0] - 0.05
    assert peft_config.task_type == task
    again = PeftModel.from_pretrained(classifier(), tmp_path).eval()
    layer = again.get_base_model().score
    assert not torch.equal(layer.modules_to_save["default"].weight, before)
    (source,) = resolve_rewards(again, tiny_tokenizer())
    scores = torch.as_tensor(trainer.predict(pairs()).predictions)[:, 0]
    found = source.score([p for p, *_ in PAIRS], [c + "<eos>" for _, c, _ in PAIRS])
    assert found == pytest.approx(scores.tolist(), abs=1e-5)


# --- Runs ---


def test_evaluation_sets_have_their_own_metrics(tmp_path, reference):
    sets = {"first": pairs(PAIRS[:2]), "rest": pairs(PAIRS[2:])}
    found = make_trainer(tmp_path, eval_dataset=sets, per_device_eval_batch_size=3).evaluate()
    for name, rows in (("first", PAIRS[:2]), ("rest", PAIRS[2:])):
        loss, _, scores = by_hand(classifier(), rows)
        assert found[f"eval_{name}_loss"] == pytest.approx(loss, rel=1e-6)
        right = sum(c > r for c, r in scores) / len(rows)
        assert found[f"eval_{name}_accuracy"] == pytest.approx(right)


def test_a_model_by_name_gets_a_layer_of_the_score_and_a_card(tmp_path):
    name = save_tiny(tmp_path / "base")
    args = config(tmp_path / "run", RewardConfig)
    trainer = RewardTrainer(name, args, train_dataset=pairs())
    assert trainer.model.score.out_features == 1
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "reward-trainer" in card and "None" not in card


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": classifier(num_labels=2)}, ValueError, "num_labels=2"),
        ({"model": tiny_model()}, TypeError, "LlamaForCausalLM"),
        ({"data": Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})},) * 1
        + (ValueError, "'chosen' and 'rejected'"),
        ({"data": pairs(image=["x"] * 6)}, NotImplementedError, "images are not available"),
        ({"router_aux_loss_coef": 0.1}, ValueError, "router_aux_loss_coef"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(tmp_path, changes, error, words):
    with pytest.raises(error, match=words):
        make_trainer(tmp_path, **changes)
