"""Checks made before anything is loaded."""

import pytest
from datasets import Dataset, IterableDataset
from online import config, dataset

from trl.trainer.online_setup import check_datasets


def stream(column="prompt", known=True):
    def rows():
        yield {column: "a"}

    found = IterableDataset.from_generator(rows)
    return found if not known else found.cast(Dataset.from_dict({column: ["a"]}).features)


TEXT = Dataset.from_dict({"text": ["a"], "label": [1]})


@pytest.mark.parametrize(
    ("train", "evaluation", "error", "words"),
    [
        (None, None, ValueError, "train_dataset is required"),
        ([{"prompt": "a"}], None, TypeError, "train_dataset must be a .* not list"),
        (TEXT, None, ValueError, "train_dataset has no 'prompt' column; it has text, label"),
        (dataset(), {"prompt": ["a"]}, TypeError, r"eval_dataset\['prompt'\] must .* not list"),
        (dataset(), "x", TypeError, "eval_dataset must be a .* not str"),
        (dataset(), TEXT, ValueError, "eval_dataset has no 'prompt' column"),
        (dataset(), {"a": dataset(), "b": TEXT}, ValueError, r"eval_dataset\['b'\] has no"),
        (stream("text"), None, ValueError, "train_dataset has no 'prompt' column; it has text"),
    ],
)
def test_bad_datasets(tmp_path, train, evaluation, error, words):
    with pytest.raises(error, match=words):
        check_datasets(train, evaluation, config(tmp_path))


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_not_available(tmp_path, column):
    data = dataset(**{column: ["x"] * 4})
    with pytest.raises(NotImplementedError, match=f"train_dataset has the column '{column}'"):
        check_datasets(data, None, config(tmp_path))
    with pytest.raises(NotImplementedError, match=r"eval_dataset\['a'\] has the column"):
        check_datasets(dataset(), {"a": data}, config(tmp_path))


def test_a_round_must_fit_into_the_dataset(tmp_path):
    """8 rows x 3 slices / 4 completions = 6 prompts a round; 5 rows hold 2 micro-batches."""
    args = config(tmp_path, steps_per_generation=3)
    words = r"has 5 rows, .* 6 prompts x 4 completions.*lower generation_batch_size to 16\."
    with pytest.raises(ValueError, match=words):
        check_datasets(dataset("abcde"), None, args)
    assert check_datasets(dataset("abcdef"), {"few": dataset("a")}, args) is None


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
