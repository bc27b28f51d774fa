"""What every trainer adds to that of transformers."""

import pytest
from online_runs import make_trainer
from transformers import Trainer


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


@pytest.mark.parametrize("offline", [True, False])
def test_the_hub_is_called_only_when_it_is_on(tmp_path, monkeypatch, offline):
    trainer = make_trainer(tmp_path)
    calls = []
    for name in ("init_hf_repo", "push_to_hub", "_push_from_checkpoint"):
        monkeypatch.setattr(
            Trainer, name, lambda self, *a, name=name, **k: calls.append((name, a, k)) or name
        )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    trainer.init_hf_repo(token="t")
    returned = trainer.push_to_hub("message", blocking=False)
    trainer._push_from_checkpoint("folder")
    expected = [
        ("init_hf_repo", (), {"token": "t"}),
        ("push_to_hub", ("message",), {"blocking": False}),
        ("_push_from_checkpoint", ("folder",), {}),
    ]
    assert calls == ([] if offline else expected)
    assert returned == (None if offline else "push_to_hub")
