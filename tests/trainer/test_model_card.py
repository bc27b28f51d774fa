"""The README of a trained model."""

from importlib import metadata

import pytest
import yaml
from online_runs import make_trainer
from tiny import lora_model
from transformers import Trainer

import trl
from trl.trainer.model_card import Method, render_model_card

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
        (None, "d", "version of a local model on d, trained with"),
        (None, None, "fine-tuned version of a local model, trained with"),
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


def test_the_card_is_named_after_the_folder(tmp_path):
    trainer = make_trainer(tmp_path / "my-run")
    trainer.model.config._name_or_path = "me/base"
    trainer.create_model_card()
    card = (tmp_path / "my-run" / "README.md").read_text()
    assert "\nmodel_name: my-run\n" in card
    assert "\nbase_model: me/base\n" in card
    assert "- rloo\n" in card
    assert "datasets:" not in card.split("---")[1]


def test_the_card_is_named_after_the_hub_id_or_the_caller(tmp_path):
    trainer = make_trainer(tmp_path, hub_model_id="me/hub-name")
    trainer.create_model_card(tags=["x"], language="en")
    assert "\nmodel_name: hub-name\n" in (tmp_path / "README.md").read_text()
    trainer.create_model_card("chosen", "me/data")
    card = (tmp_path / "README.md").read_text()
    assert "\nmodel_name: chosen\n" in card
    assert "\ndatasets: me/data\n" in card


def test_each_checkpoint_has_a_card_beside_its_weights(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2).train()
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / "model.safetensors").exists()
        assert "library_name: transformers" in (folder / "README.md").read_text()


@pytest.mark.parametrize("adapter", [False, True])
def test_a_saved_model_has_the_card_of_its_trainer(tmp_path, adapter):
    trainer = make_trainer(tmp_path, model=lora_model() if adapter else None)
    trainer.save_model()
    assert (tmp_path / f"{'adapter_' * adapter}model.safetensors").exists()
    card = (tmp_path / "README.md").read_text()
    assert "- rloo\n" in card and "@inproceedings{ahmadian2024back" in card


def test_uploads_are_those_of_transformers_except_of_unfinished_checkpoints(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    calls = []
    for name in ("push_to_hub", "_push_from_checkpoint"):
        monkeypatch.setattr(
            Trainer, name, lambda self, *a, name=name, **k: calls.append((name, a, k)) or name
        )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert trainer.push_to_hub("message", blocking=False) == "push_to_hub"
    trainer._push_from_checkpoint("folder")
    trainer._is_saving = True
    trainer._push_from_checkpoint("unfinished")
    assert calls == [
        ("push_to_hub", ("message",), {"blocking": False}),
        ("_push_from_checkpoint", ("folder",), {}),
    ]


def test_titles_of_papers_are_those_of_their_entries():
    for name, title in (
        ("DPO", "Direct Preference Optimization: Your Language Model is Secretly a Reward Model"),
        ("KTO", "KTO: Model Alignment as Prospect Theoretic Optimization"),
        ("OnlineDPO", "Direct Language Model Alignment from Online AI Feedback"),
    ):
        assert f": [{title}](https" in getattr(trl, f"{name}Trainer").method.reference
