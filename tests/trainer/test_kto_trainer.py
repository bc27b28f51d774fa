"""What one step of KTO computes, against rows computed one by one from full logits."""

import math
import weakref

import pytest
import torch
from datasets import Dataset
from kto_runs import ROWS, by_hand, labelled, make_trainer, other_model, partners_of
from peft import LoraConfig
from sft_runs import config, direction, encoded, logged, relative, weights
from tiny import save_tiny, tiny_model, tiny_tokenizer

from trl.data.examples import num_tokens
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

SPLITS = {
    "one micro-batch": {},
    "single rows": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "three, three, two": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "shuffled": {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "padded rows": {"shared_prefix": False},
    "token budget": {"max_tokens_per_micro_batch": 60, "gradient_accumulation_steps": 8},
    "checkpointing": {"gradient_checkpointing": True},
}
# A policy and a reference far enough apart for the estimate to be above 0.
STEEP = {"beta": 0.5, "learning_rate": 1.0}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    partners = partners_of(make_trainer(tmp_path_factory.mktemp("partners")))
    return by_hand(tiny_model(), other_model(), partners, beta=0.5)


def of_label(values, label):
    return [value for value, (_, _, good) in zip(values, ROWS, strict=True) if good == label]


@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradient_are_those_of_rows_computed_singly(tmp_path, reference, split):
    loss, gradient, kl, ratios = reference
    assert kl > 0.01
    trainer = make_trainer(tmp_path, **(STEEP | SPLITS[split]))
    assert relative(direction(trainer), gradient) <= 5e-6
    (entry, *_) = trainer.state.log_history
    assert entry["loss"] == pytest.approx(loss, rel=5e-6)
    assert entry["kl"] == pytest.approx(kl, abs=2e-5)  # of sums of about 100 nats
    for name, label in (("chosen", True), ("rejected", False)):
        values = of_label(ratios, label)
        mean = 0.5 * sum(values) / len(values)
        assert entry[f"rewards/{name}"] == pytest.approx(mean, rel=1e-4)
    margin = entry["rewards/chosen"] - entry["rewards/rejected"]
    assert entry["rewards/margins"] == pytest.approx(margin, rel=1e-5)
    assert entry["num_tokens"] == sum(len(encoded(p, c)[0]) for p, c, _ in ROWS)
    assert entry["entropy"] > 0 and entry["logps/chosen"] < 0


def test_apo_zero_has_no_estimate(tmp_path):
    expected = by_hand(tiny_model(), other_model(), [""] * 8, beta=0.5, kl=False)
    trainer = make_trainer(tmp_path, loss_type="apo_zero_unpaired", **STEEP)
    assert "kl_completion_ids" not in trainer.train_dataset.column_names
    assert relative(direction(trainer), expected[1]) <= 5e-6
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-6)]
    assert logged(trainer, "kl") == [0.0]


@pytest.mark.parametrize("split", ["one micro-batch", "single rows"])
def test_labels_have_weights(tmp_path, split):
    partners = partners_of(make_trainer(tmp_path))
    expected = by_hand(tiny_model(), other_model(), partners, beta=0.5, weights=(0.5, 1.5))
    changes = SPLITS[split] | {"desirable_weight": 0.5, "undesirable_weight": 1.5}
    trainer = make_trainer(tmp_path, **STEEP, **changes)
    assert relative(direction(trainer), expected[1]) <= 5e-6
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-6)]


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_one_label(tmp_path, label):
    rows = [row for row in ROWS if row[2] == label]
    trainer = make_trainer(tmp_path, labelled(rows), **STEEP)
    expected = by_hand(tiny_model(), other_model(), partners_of(trainer, rows), rows, 0.5)
    assert relative(direction(trainer), expected[1]) <= 5e-6
    (entry, *_) = trainer.state.log_history
    absent = "rejected" if label else "chosen"
    assert entry[f"rewards/{absent}"] is None and entry["rewards/margins"] is None


def test_at_the_first_step_policy_and_reference_are_equal(tmp_path):
    trainer = make_trainer(tmp_path, ref_model=False)
    trainer.train()
    (entry, *_) = trainer.state.log_history
    assert entry["loss"] == pytest.approx(0.5, abs=1e-6)
    # Policy and reference may lie differently in memory, and round differently.
    names = ("kl", "rewards/chosen", "rewards/rejected")
    assert max(abs(entry[name]) for name in names) <= 1e-6


def test_the_estimate_is_clamped_over_the_whole_step(tmp_path):
    """The mean of clamped parts would be higher: noise of a few rows would look like divergence."""
    singly = make_trainer(tmp_path, **STEEP, **SPLITS["single rows"])
    seen, loss = [], singly.loss

    def watched(scores, batch):
        seen.append(batch.columns["kl"])
        return loss(scores, batch)

    singly.loss = watched
    singly.train()
    assert len(seen) == 8 and len(set(map(float, seen))) == 1
    assert not any(kl.requires_grad for kl in seen)


def test_the_estimate_is_the_same_for_every_split(tmp_path):
    """In float64, where rounding does not hide a difference; with a NaN it is one as well."""
    found = []
    for split in ("one micro-batch", "single rows", "three, three, two"):
        models = tiny_model().double(), other_model().double()
        trainer = make_trainer(tmp_path / split, None, *models, **SPLITS[split])
        trainer.train()
        found += logged(trainer, "kl")
    assert len(found) == 3 and found[0] > 0.01
    assert max(found) - min(found) <= 1e-6
    batch = trainer.collate([trainer.train_dataset[i] for i in range(3)])
    ratios = torch.tensor([0.2, math.nan, 0.6]).repeat_interleave(2)
    batch = batch.with_columns(mismatched_ratios=ratios)
    assert trainer.algorithm.estimate_kl([batch], trainer.ranks).isnan()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_other_answers_share_the_prompt(tmp_path, accumulation):
    """Policy and reference see P + 2R of each row, if one forward is all of the step.

    Only P + R of them with gradient.
    """
    sizes = {"per_device_train_batch_size": 8 // accumulation}
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=accumulation, **sizes)
    seen = {"policy": [], "reference": []}
    for name, model in (("policy", trainer.model), ("reference", trainer.reference.model)):
        model.model.register_forward_pre_hook(
            lambda module, args, inputs, found=seen[name]: found.append(
                (inputs["input_ids"].numel(), torch.is_grad_enabled())
            ),
            with_kwargs=True,
        )
    trainer.train()
    everything = sum(map(num_tokens, trainer.train_dataset))
    sizes = [size for size, _ in seen["policy"]]
    # Of several micro-batches, all other answers are scored before the first one is trained on.
    expected = {1: [True, False], 2: [False, False, True, True]}
    assert [with_gradient for _, with_gradient in seen["policy"]] == expected[accumulation]
    assert seen["reference"][-1][0] <= everything / accumulation + 64
    if accumulation == 1:
        ids = trainer.train_dataset["kl_completion_ids"]
        assert sizes[1] == sum(len(one) - 1 for one in ids)
        assert sum(sizes) <= everything and seen["reference"][-1][0] <= everything


@pytest.mark.parametrize("split", ["one micro-batch", "single rows"])
def test_the_reference_may_be_scored_beforehand(tmp_path, monkeypatch, reference, split):
    """Of both answers of each row; another seed has other partners, and computes anew."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for seed in (1, 42):
        changes = SPLITS[split] | {"precompute_ref_log_probs": True, "seed": seed}
        trainer = make_trainer(tmp_path, **STEEP, **changes)
        found = direction(trainer)
    assert relative(found, reference[1]) <= 5e-6
    assert logged(trainer, "kl") == [pytest.approx(reference[2], abs=2e-5)]
    assert len(list((tmp_path / "cache" / "trl").glob("*.npy"))) == 2


# --- Data ---


def test_pairs_become_two_rows_next_to_each_other(tmp_path):
    data = Dataset.from_dict({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]})
    trainer = make_trainer(tmp_path, data)
    rows = trainer.train_dataset
    decoded = list(map(tiny_tokenizer().decode, rows["completion_ids"]))
    assert decoded == ["c<eos>", "e<eos>", "d<eos>", "f<eos>"]
    assert rows["label"][:] == [True, False, True, False]
    trainer.train()
    assert math.isfinite(logged(trainer, "loss")[0])


def test_labels_of_unequal_numbers_are_told_of(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("trl.trainer.kto_trainer.logger.warning", said.append)
    make_trainer(tmp_path)
    make_trainer(tmp_path, desirable_weight=0.7)
    make_trainer(tmp_path, undesirable_weight=1.6)
    assert said == [
        "5 rows are desirable and 3 are not. To let both weigh about the same, set "
        "desirable_weight between 0.60 and 0.80, or undesirable_weight between 1.25 and 1.67."
    ]


# --- Runs ---


def test_evaluation_of_the_training_rows_gives_the_training_loss(tmp_path, reference):
    """For any size of the batches: the estimate is over the dataset."""
    sets = {"same": labelled(), "short": labelled(ROWS[:3])}
    trainer = make_trainer(tmp_path, eval_dataset=sets, per_device_eval_batch_size=3, beta=0.5)
    found = trainer.evaluate()
    assert found["eval_same_loss"] == pytest.approx(reference[0], rel=1e-6)
    assert found["eval_same_kl"] == pytest.approx(reference[2], abs=2e-5)
    assert found["eval_short_loss"] != pytest.approx(reference[0], rel=1e-3)
    assert trainer.predict(labelled()).metrics["test_loss"] == pytest.approx(reference[0], rel=1e-6)


def test_an_evaluation_keeps_no_numbers_of_tokens(tmp_path, monkeypatch):
    """However many batches it has: their masks, reference values and scores are let go."""
    scored, alive = [], []
    original = KTOTrainer.loss

    def loss(self, scores, batch):
        tensors = [scores.logps, batch.loss_mask, batch.columns["ref_logps"]]
        scored.extend(weakref.ref(tensor) for tensor in tensors)
        alive.append(sum(reference() is not None for reference in scored))
        return original(self, scores, batch)

    trainer = make_trainer(tmp_path, eval_dataset=labelled(), per_device_eval_batch_size=1)
    monkeypatch.setattr(KTOTrainer, "loss", loss)
    trainer.evaluate()
    assert len(alive) == 8 and max(alive) <= 6  # of this batch, and of the one before


def test_predictions_are_of_every_row_under_its_number(tmp_path, reference):
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=3, beta=0.5)
    found = trainer.predict(labelled()).predictions
    assert found["rewards"].shape == found["logps"].shape == (8, 1)
    assert found["rewards"][:, 0] == pytest.approx([0.5 * x for x in reference[3]], rel=1e-4)
    data = Dataset.from_dict(
        {"prompt": ["a", "b" * 9, "d"], "chosen": list("efg"), "rejected": ["h", "i", "jkl"]}
    )
    trainer = make_trainer(tmp_path, max_length=6, beta=0.5)
    found = trainer.predict(data).predictions["logps"]
    assert found.shape == (3, 2) and math.isnan(found[1, 0]) and math.isnan(found[1, 1])
    assert found[2, 1] < found[2, 0]  # the longer one was rejected


def test_lora(tmp_path):
    peft_config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options = {"learning_rate": 5.0, "max_steps": 6, "ref_model": False, "beta": 0.5}
    trainer = make_trainer(tmp_path, peft_config=peft_config, **options)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(0.5, abs=1e-6) and losses[-1] < losses[0] - 0.02
    assert logged(trainer, "rewards/margins")[-1] > 0


def test_a_resumed_run_ends_as_one_that_went_on(tmp_path):
    settings = {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
    }
    alone = make_trainer(tmp_path / "alone", **settings)
    alone.train()
    again = make_trainer(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "alone" / "checkpoint-3"))
    assert torch.equal(weights(again.model), weights(alone.model))
    names = ("loss", "kl", "num_tokens")
    for name in names:
        assert logged(again, name) == logged(alone, name)


def test_what_runs_out_of_memory_is_computed_in_pieces(tmp_path, reference):
    trainer = make_trainer(tmp_path, **STEEP)
    loss, sizes = trainer.loss, []

    def narrow(scores, batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss(scores, batch)

    trainer.loss = narrow
    assert relative(direction(trainer), reference[1]) <= 5e-6
    assert max(sizes) == 8 and sum(size for size in sizes if size <= 3) == 8


def test_a_stream(tmp_path):
    trainer = make_trainer(tmp_path, labelled().to_iterable_dataset(), max_steps=2, **STEEP)
    trainer.train()
    tokens = sum(len(encoded(p, c)[0]) for p, c, _ in ROWS)
    assert logged(trainer, "num_tokens") == [tokens, 2 * tokens]


def test_a_model_by_name_is_saved_with_a_card(tmp_path):
    name = save_tiny(tmp_path / "base")
    args = config(tmp_path / "run", KTOConfig)
    trainer = KTOTrainer(name, name, args, train_dataset=labelled())
    trainer.train()
    trainer.create_model_card()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "2402.01306" in card and "- kto" in card


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"data": Dataset.from_dict({"text": ["a"]})}, ValueError, "have the columns"),
        (
            {"data": labelled().add_column("image", ["x"] * 8)},
            NotImplementedError,
            "images are not available",
        ),
        ({"data": labelled([("a", "b", True)] * 2)}, ValueError, "has no partner"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(tmp_path, changes, error, words):
    with pytest.raises(error, match=words):
        make_trainer(tmp_path, **changes)
