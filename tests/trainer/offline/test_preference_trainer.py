"""What DPO and KTO do alike: pieces, and what becomes of datasets from end to end."""

import datasets
import dpo_runs
import kto_runs
import pytest
import torch
from datasets import Dataset
from dpo_runs import BOUND, by_hand, gradient_of, make_trainer, other_model, pairs
from peft import LoraConfig
from sft_runs import encoded, logged, relative
from tiny import tiny_model

from trl.data.examples import num_tokens

MAKERS = {"DPO": dpo_runs.make_trainer, "KTO": kto_runs.make_trainer}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@both
def test_the_reference_scores_the_pieces_of_training(tmp_path, make):
    """So no more is held without gradient than with it, and both round alike: ratios are 0."""
    trainer = make(tmp_path, ref_model=tiny_model(), max_tokens_per_piece=40)
    tokens, read = {True: [], False: []}, trainer.scorer.read

    def watched(model, rows, *options):
        tokens[torch.is_grad_enabled()].append(sum(rows.computed_tokens()))
        return read(model, rows, *options)

    trainer.scorer.read = watched
    trainer.train()
    assert len(tokens[True]) > 3 and len(tokens[False]) >= len(tokens[True])
    longest = max(map(num_tokens, trainer.train_dataset))
    assert max(tokens[False]) <= max(40, longest)
    for label in ("chosen", "rejected"):
        assert logged(trainer, f"rewards/{label}") == [pytest.approx(0.0, abs=1e-6)]


def test_what_is_cut_is_counted_and_not_trained_on(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("trl.data.cutting.logger.warning", told.append)
    data = dpo_runs.pairs([("0123456789", "abcdef", "xy"), ("01", "a", "b"), ("01", "cd", "ef")])
    limits = {"max_prompt_length": 4, "max_completion_length": 3}
    trainer = dpo_runs.make_trainer(tmp_path, data, **limits)
    # 6 of the prompt; and of 7, as the end of an answer is a token.
    assert told == [
        "1 of 3 rows longer than max_prompt_length=4, max_completion_length=3: "
        "10 tokens left out, 4 of them trained."
    ]
    trainer.train()
    assert trainer.state.num_input_tokens_seen == (4 + 3 + 3) + (2 + 2 + 2) + (2 + 3 + 3)


@both
def test_a_stream_trains_on_what_its_dataset_does(tmp_path, make):
    """Of KTO, what has no estimate: whose answer is scored for it depends on what is seen."""
    options = {"loss_type": "apo_zero_unpaired"} if make is kto_runs.make_trainer else {}
    data = dpo_runs.pairs()
    found = []
    for name, rows in (("rows", data), ("stream", data.to_iterable_dataset())):
        options |= {"per_device_train_batch_size": 16}
        found.append(gradient_of(make(tmp_path / name, rows, max_steps=1, **options)))
    assert relative(*found) <= 1e-6


@both
def test_a_row_that_is_there_twice_counts_twice(tmp_path, make):
    once = [("2+3=", "5", "6, or not"), ("x", "yz", "y")]
    options = {"loss_type": "apo_zero_unpaired"} if make is kto_runs.make_trainer else {}
    found = []
    for rows in (once, once * 2):
        options |= {"per_device_train_batch_size": 16}
        trainer = make(tmp_path / str(len(rows)), dpo_runs.pairs(rows), max_steps=1, **options)
        found.append(gradient_of(trainer))
    assert relative(*found) <= 1e-6


UNUSUAL = [
    ("a prompt that is too long", "abcdef", ""),  # no token but the end
    ("x", "y<eos>z", "<eos>a"),  # an end token that does not end it
    ("2+3=", "5", "<pad>5"),
]


@both
@pytest.mark.parametrize("size", [1, 3])
def test_unusual_answers_are_scored_as_each_by_itself(tmp_path, make, size):
    """Every token of them counts, and tokens of padding are tokens like others."""
    trainer = make(tmp_path, max_prompt_length=8, per_device_eval_batch_size=size)
    found = torch.tensor(trainer.predict(dpo_runs.pairs(UNUSUAL)).predictions["logps"])
    encoded = dpo_runs.encoded(UNUSUAL)
    with torch.no_grad():
        for row, logps in zip(encoded, found, strict=True):
            (pair,) = dpo_runs.token_logps(trainer.model, [(row[0][-8:], *row[1:])])
            expected = torch.stack([tokens.sum() for tokens, _ in pair])
            assert (logps - expected).abs().max() <= 2e-5


def test_equal_answers_of_a_pair_teach_nothing(tmp_path):
    trainer = dpo_runs.make_trainer(tmp_path, dpo_runs.pairs([("2+3=", "5", "5"), ("a", "b", "b")]))
    assert float(gradient_of(trainer).abs().max()) <= 1e-7
    assert logged(trainer, "rewards/ties") == [1.0]


def test_tools_of_a_column_are_in_the_prompt(tmp_path):
    """As the template writes them, whether the column has lists or JSON."""
    import json

    from tool_chat import tool_tokenizer

    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    row = {
        "prompt": [{"role": "user", "content": "2+3"}],
        "chosen": [{"role": "assistant", "content": "5"}],
        "rejected": [{"role": "assistant", "content": "6"}],
    }
    tokenizer, shown = tool_tokenizer(), []
    for number, tools in enumerate((None, json.dumps([tool]))):
        data = Dataset.from_list([row | {"tools": tools}] * 2)
        made = dpo_runs.make_trainer(tmp_path / str(number), data, tokenizer=tokenizer)
        shown.append(tokenizer.decode(made.train_dataset[0]["prompt_ids"]))
    assert "add" not in shown[0] and "add" in shown[1]


def mean_logits(model, answers):
    """The mean, over tokens of all (prompt, answer), of the mean of their logits."""
    found = []
    for prompt, answer in answers:
        ids, first = encoded(prompt, answer)
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits[0, first - 1 : -1].mean(1))
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("size", [8, 3])
def test_logits_are_logged(tmp_path, size):
    """Without being held, whatever the micro-batches; in an evaluation as well."""
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": -(-8 // size)}
    options |= {"per_device_eval_batch_size": size, "learning_rate": 0.0}
    sides = {
        "DPO": [[(prompt, row[i]) for prompt, *row in dpo_runs.PAIRS] for i in (0, 1)],
        "KTO": [[row[:2] for row in kto_runs.ROWS if row[2] is label] for label in (True, False)],
    }
    evaluated = {"DPO": dpo_runs.pairs(), "KTO": kto_runs.labelled()}
    for name, make in MAKERS.items():
        trainer = make(tmp_path / name, eval_dataset=evaluated[name], **options)
        trainer.train()
        trainer.evaluate()
        for side, found in zip(("chosen", "rejected"), sides[name], strict=True):
            expected = pytest.approx(mean_logits(trainer.model, found), abs=1e-6)
            assert logged(trainer, f"logits/{side}") == [expected]
            assert logged(trainer, f"eval_logits/{side}") == [expected]


# --- Log-probabilities of the reference, computed beforehand ---


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "trl"


def files(cache):
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("*")}


def make(folder, **changes):
    options = {"precompute_ref_log_probs": True, "ref_model": other_model()} | changes
    return make_trainer(folder, **options)


def test_the_update_is_the_same_and_the_reference_is_let_go(tmp_path):
    expected = by_hand(tiny_model(), other_model())
    split = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    trainer = make(tmp_path, precompute_ref_batch_size=5, eval_dataset=pairs(), **split)
    trainer.begin_training()
    assert {"ref_chosen_logps", "ref_rejected_logps"} <= {*trainer.train_dataset.column_names}
    assert relative(gradient_of(trainer), expected[1]) <= BOUND
    assert trainer.reference is None
    found = trainer.evaluate()["eval_rewards/margins"]
    live = make_trainer(tmp_path, ref_model=other_model(), eval_dataset=pairs(), **split)
    live.train()
    assert found == pytest.approx(live.evaluate()["eval_rewards/margins"], abs=1e-5)
    of_train = trainer.evaluate(trainer.train_dataset)["eval_rewards/margins"]
    assert of_train == pytest.approx(found, abs=1e-5)
    assert trainer.predict(trainer.train_dataset).predictions["rewards"].shape == (8, 2)
    with pytest.raises(ValueError, match="only datasets that were passed to the trainer"):
        trainer.evaluate(pairs())


def test_a_replaced_evaluation_set_is_scored_by_the_reference_as_well(tmp_path):
    trainer = make(tmp_path, eval_dataset=pairs(dpo_runs.PAIRS[:3]))
    trainer.eval_dataset = {"raw": pairs()}
    trainer.begin_training()
    trainer.evaluate()
    assert "ref_chosen_logps" in trainer.eval_dataset["raw"].column_names


def test_equal_layouts_give_equal_numbers(tmp_path):
    """The reference is the policy as it was, so that nothing has moved: no bit differs."""
    trainer = make(tmp_path, ref_model=None)
    trainer.train()
    assert logged(trainer, "rewards/margins") == [0.0] and logged(trainer, "rewards/ties") == [1.0]


CHANGES = {
    "the same": {},
    "dataset": {"data": pairs([("a", "b", "c"), ("d", "e", "f")])},
    "weights": {"ref_model": tiny_model(seed=2)},
    "lengths": {"max_length": 12},
    "truncation": {"max_length": 12, "truncation_mode": "keep_end"},
    "ld_alpha": {"ld_alpha": 0.5},
    "precision": {"bf16": True},
    "layout": {"shared_prefix": False},
    "batches": {"precompute_ref_batch_size": 2},
}


def test_a_changed_key_computes_anew(tmp_path, cache):
    make(tmp_path).begin_training()
    (first,) = files(cache).items()
    for count, changes in enumerate(CHANGES.values(), 1):
        make(tmp_path, **changes).begin_training()
        found = files(cache)
        assert len(found) == count and found[first[0]] == first[1], changes
    path = cache / first[0]
    path.write_bytes(path.read_bytes()[:40])  # damaged
    make(tmp_path).begin_training()
    assert files(cache)[first[0]] != first[1] and len(files(cache)) == len(CHANGES)


def test_without_an_adapter(tmp_path, cache):
    peft_config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    for folder in ("first", "again"):
        trainer = make(tmp_path / folder, ref_model=None, peft_config=peft_config, max_steps=2)
        trainer.train()
        assert logged(trainer, "rewards/margins")[0] == 0.0 and len(files(cache)) == 1
    assert trainer.reference is not None
    trainer.evaluate(pairs())


def test_what_cannot_be_precomputed(tmp_path):
    with pytest.raises(ValueError, match="needs datasets of known length, but train_dataset is"):
        make(tmp_path, data=pairs().to_iterable_dataset())
    with pytest.raises(ValueError, match="cannot be used with sync_ref_model=True: the ref"):
        make(tmp_path, sync_ref_model=True)
