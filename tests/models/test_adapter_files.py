"""What is wrong with a stored adapter is said before its base model is loaded, by file."""

import json

import pytest
from tiny import lora_model, save_tiny

from trl.models.adapter_files import CONFIG, WEIGHTS, read_adapter_config
from trl.models.loading import adapter_base, load_adapter, load_policy


@pytest.fixture
def folder(tmp_path):
    lora_model().save_pretrained(tmp_path / "adapter")
    change(tmp_path / "adapter", base_model_name_or_path=save_tiny(tmp_path / "base"))
    return tmp_path / "adapter"


def change(folder, **facts):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | facts))


def test_an_adapter_is_read_and_loaded(folder):
    assert read_adapter_config(str(folder)).r == 2
    base, _ = adapter_base(str(folder))
    assert load_adapter(load_policy(base, None), str(folder)).peft_config["default"].r == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "adapter_config.json is not valid JSON: Expecting property name"),
        ("{}", "does not say what kind of adapter this is: peft_type is missing"),
        ('{"peft_type": "LORAA"}', "peft has no peft_type 'LORAA'. Did you mean LORA?"),
        ('{"peft_type": "X"}', "peft has no peft_type 'X'. Kinds are PROMPT_TUNING, "),
    ],
)
def test_damaged_configurations(folder, text, error):
    (folder / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=error):
        adapter_base(str(folder))


def test_missing_weights(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="is missing, so the adapter has no weights"):
        adapter_base(str(folder))


def test_weights_of_another_rank(folder):
    change(folder, r=4)
    base, _ = adapter_base(str(folder))
    with pytest.raises(ValueError, match="adapter' does not fit the model '.*base': size mismatch"):
        load_adapter(load_policy(base, None), str(folder))
