"""The README of a trained model."""

from importlib import metadata

import pytest
import yaml

from trl.trainer.base.model_card import Method, _version, render_model_card

METHOD = Method("ABC", "abc", "A paper", "1234.56789", "\n@article{a, cost = {$5 ${x}}}\n\n")


def card(base="me/base", data="me/data"):
    return render_model_card(METHOD, "my-model", base, data)


def front_matter(text):
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def test_front_matter():
    assert front_matter(card()) == {
        "base_model": "me/base",
        "datasets": "me/data",
        "library_name": "transformers",
        "model_name": "my-model",
        "tags": ["generated_from_trainer", "trl", "abc"],
    }


@pytest.mark.parametrize(
    ("base", "data", "sentence"),
    [
        ("b", "d", "version of [b](https://huggingface.co/b) on d, trained with"),
        ("b", None, "version of [b](https://huggingface.co/b), trained with"),
        (None, "d", "version on d, trained with"),
        (None, None, "fine-tuned version, trained with"),
    ],
)
def test_what_is_unknown_is_left_out(base, data, sentence):
    text = card(base, data)
    assert sentence in text
    assert ("base_model" in front_matter(text)) == (base is not None)
    assert ("datasets" in front_matter(text)) == (data is not None)
    assert "None" not in text


def test_paths_of_this_machine_are_left_out(tmp_path):
    """The hub refuses a card with names that cannot be its own."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("{}")
    text = card(str(tmp_path), str(data))
    assert str(tmp_path) not in text
    assert not {"base_model", "datasets"} & front_matter(text).keys()
    assert "base_model" not in front_matter(card("/gone/model"))


def test_method_is_cited():
    text = card()
    assert "\n# my-model\n" in text
    assert "ABC: [A paper](https://huggingface.co/papers/1234.56789)." in text
    assert "```bibtex\n@article{a, cost = {$5 ${x}}}\n```" in text
    assert 'model="my-model"' in text


def test_versions():
    listed = card().split("## Versions\n\n")[1].split()
    names = ["trl:", "transformers:", "torch:", "accelerate:", "datasets:"]
    assert [word for word in listed if word.endswith(":")] == names
    assert f"- torch: {metadata.version('torch')}\n" in card()
    assert _version("surely-absent-package") == "unknown"
