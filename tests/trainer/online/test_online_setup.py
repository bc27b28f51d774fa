"""Which prompts can be used, and in which order they are read."""

import pytest
import torch
from datasets import Dataset, IterableDataset, load_from_disk
from online_runs import (
    PROMPTS,
    config,
    dataset,
    make_trainer,
    prompts_seen,
    records,
    weights,
)
from tiny import CountingTokenizer, tiny_tokenizer

from trl.trainer.online.online_setup import (
    check_datasets,
    prompt_limit,
)


def stream(column="prompt", known=True):
    def rows():
        yield {column: "a"}

    found = IterableDataset.from_generator(rows)
    return found if not known else found.cast(Dataset.from_dict({column: ["a"]}).features)


TEXT = Dataset.from_dict({"text": ["a"], "label": [1]})


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_not_available(tmp_path, column):
    data = dataset(**{column: ["x"] * 4})
    with pytest.raises(NotImplementedError, match=f"train_dataset has the column '{column}'"):
        check_datasets(data, None, config(tmp_path))
    with pytest.raises(NotImplementedError, match=r"eval_dataset\['a'\] has the column"):
        check_datasets(dataset(), {"a": data}, config(tmp_path))


def test_a_round_must_fit_into_the_dataset(tmp_path):
    """8 rows x 3 micro-batches / 4 completions = 6 prompts a round; 5 rows hold 2 micro-batches."""
    args = config(tmp_path, steps_per_generation=3)
    words = r"has 5 rows, .* 6 prompts x 4 completions.*lower generation_batch_size to 16\."
    with pytest.raises(ValueError, match=words):
        check_datasets(dataset("abcde"), None, args)
    assert check_datasets(dataset("abcdef"), {"few": dataset("a")}, args) is None


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["a", "b", None, "d"], r"row 2 of {} \(None\) is missing\. Remove such rows"),
        ([[{"role": "user", "content": "a"}], []], r"row 1 of {} \(\[\]\) has no messages"),
    ],
)
def test_a_missing_prompt_is_found_before_the_model_is_loaded(tmp_path, prompts, words):
    data, options = dataset(prompts), {"model": "absent/model", "num_generations": 4}
    with pytest.raises(ValueError, match=words.format("train_dataset")):
        make_trainer(tmp_path, data=data, **options)
    with pytest.raises(ValueError, match=words.format(r"eval_dataset\['x'\]")):
        make_trainer(tmp_path, eval_dataset={"x": data}, **options)


def test_streams_have_no_length(tmp_path):
    assert check_datasets(stream(), stream(), config(tmp_path, max_steps=3)) is None
    with pytest.raises(ValueError, match="set max_steps above 0"):
        check_datasets(stream(), None, config(tmp_path, max_steps=-1))


@pytest.mark.parametrize("name", ["dispatch_batches", "split_batches"])
@pytest.mark.parametrize("train", [dataset(), stream()])
def test_batches_of_text_are_not_sent_around(tmp_path, name, train):
    args = config(tmp_path, max_steps=3, accelerator_config={name: True})
    with pytest.raises(ValueError, match=rf"accelerator_config\.{name}=True cannot be used"):
        check_datasets(train, None, args)


def test_streams_of_unknown_columns_are_not_looked_into(tmp_path):
    data = stream("text", known=False)
    assert data.column_names is None
    assert check_datasets(data, None, config(tmp_path)) is None


def test_completions_leave_room_for_prompts(tmp_path):
    args = config(tmp_path, max_completion_length=256)
    with pytest.raises(
        ValueError, match="max_completion_length=256 leaves no room .* At most 255 minus"
    ):
        prompt_limit(args, 256)
    assert prompt_limit(args, 257).tokens == 256 and prompt_limit(args, None).tokens is None


def eval_stream():
    return IterableDataset.from_generator(lambda: ({"prompt": p} for p in ("xy", "z", "w")))


@pytest.mark.parametrize("given", ["at construction", "to evaluate", "to predict"])
def test_iterable_evaluation(tmp_path, given):
    """Whoever gives the stream: it is read in this process, and training keeps its workers."""
    early = {"eval_dataset": eval_stream()} if given == "at construction" else {}
    trainer = make_trainer(
        tmp_path, **early, per_device_eval_batch_size=8, dataloader_num_workers=2
    )
    if given == "to predict":
        found = trainer.predict(eval_stream()).metrics
        assert found["test_reward"] == found["test_rewards/token_sum/mean"]
    else:
        found = trainer.evaluate(*([] if early else [eval_stream()]))
        assert "eval_reward" in found
    assert [r["prompt"] for r in records(tmp_path, "eval")] == ["xy"] * 4 + ["z"] * 4 + ["w"] * 4
    assert trainer.args.dataloader_num_workers == 2
    trainer.train()
    assert prompts_seen(tmp_path) == {0: PROMPTS[:2]}


def test_what_predict_collects_is_not_in_the_next_evaluation(tmp_path):
    """Nor does it matter to training that something was predicted."""
    trainer = make_trainer(tmp_path / "a", eval_dataset=dataset("xy"), per_device_eval_batch_size=8)
    plain = make_trainer(tmp_path / "b", eval_dataset=dataset("xy"), per_device_eval_batch_size=8)
    trainer.predict(dataset("z"))
    for name in ("eval_reward", "eval_completions/mean_length"):
        assert trainer.evaluate()[name] == plain.evaluate()[name]
    trainer.train()
    plain.train()
    assert torch.equal(weights(trainer.model), weights(plain.model))


def test_a_second_start_tokenizes_no_prompt(tmp_path):
    """Nor does a start with another limit; prompts are tokenized when they are used."""
    dataset().save_to_disk(tmp_path / "rows")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenized = []
    for longest in (None, None, 8):
        tokenizer = CountingTokenizer.from_pretrained(tmp_path / "tokenizer")
        data = load_from_disk(tmp_path / "rows")
        options = {"processing_class": tokenizer, "max_prompt_length": longest}
        trainer = make_trainer(tmp_path, data=data, reward_dry_run=False, **options)
        tokenized.append(list(tokenizer.tokenized))
    assert tokenized == [PROMPTS, [], []]
    trainer.train()
    assert sorted(set(tokenizer.tokenized)) == PROMPTS[:2]


def test_a_dataset_given_to_evaluate_is_checked(tmp_path):
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=8)
    with pytest.raises(ValueError, match="eval_dataset has no 'prompt' column; it has text"):
        trainer.evaluate(Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(NotImplementedError, match="eval_dataset has the column 'image'"):
        trainer.evaluate(dataset("z", image=["x"]))
