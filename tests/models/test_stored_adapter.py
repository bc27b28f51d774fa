"""What a folder says about its adapter, and which folders and adapters are refused."""

import json

import peft
import pytest
from tiny import save_tiny
from transformers import AutoModelForCausalLM

from trl.models.stored_adapter import read_adapter

LORA = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
PROMPTS = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")


@pytest.fixture
def base(tmp_path):
    return save_tiny(tmp_path / "base")


def store(base, config, folder):
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return str(folder)


def change(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_what_is_read(base, tmp_path):
    adapter = read_adapter(store(base, LORA, tmp_path / "out" / "checkpoint-2"))
    assert (adapter.base_model, adapter.quantization) == (base, None)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert adapter.shapes[name] == [8, 32]
    (tmp_path / "out" / "run.json").write_text('{"quantization": {"load_in_4bit": true}}')
    moved = read_adapter(str(adapter.folder), "elsewhere")
    assert (moved.base_model, moved.quantization) == ("elsewhere", {"load_in_4bit": True})


def test_a_whole_model_has_nothing_to_merge(base):
    with pytest.raises(ValueError, match="holds a whole model, not an adapter: nothing to merge"):
        read_adapter(base)


def test_a_folder_without_adapter(base, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError, match=r"out holds no adapter: adapter_config\.json is"):
        read_adapter(str(tmp_path / "out"))
    for step in (9, 10):
        store(base, LORA, tmp_path / "out" / f"checkpoint-{step}")
    with pytest.raises(FileNotFoundError, match=r"missing\. The newest in it is .*checkpoint-10\."):
        read_adapter(str(tmp_path / "out"))


def test_a_folder_that_is_not_there(base, tmp_path):
    store(base, LORA, tmp_path / "output")
    with pytest.raises(FileNotFoundError, match="Did you mean output?"):
        read_adapter(str(tmp_path / "outptu"))


def test_missing_weights(base, tmp_path):
    folder = store(base, LORA, tmp_path / "out")
    (tmp_path / "out" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors is missing, so"):
        read_adapter(folder)


def test_kinds_that_cannot_be_merged(base, tmp_path):
    folder = store(base, PROMPTS, tmp_path / "out")
    with pytest.raises(ValueError, match="adapter of type PROMPT_TUNING adds tokens or layers"):
        read_adapter(folder)


def test_tasks_that_no_trainer_has(base, tmp_path):
    folder = store(base, LORA, tmp_path / "out")
    change(tmp_path / "out", task_type="TOKEN_CLS")
    with pytest.raises(ValueError, match="task_type='TOKEN_CLS': only adapters of causal"):
        read_adapter(folder)


def test_a_base_model_that_is_not_named_or_is_an_adapter(base, tmp_path):
    folder = store(base, LORA, tmp_path / "out")
    change(tmp_path / "out", base_model_name_or_path=None)
    with pytest.raises(ValueError, match="does not name the model .* give --base_model"):
        read_adapter(folder)
    assert read_adapter(folder, base).base_model == base
    with pytest.raises(ValueError, match="is an adapter itself. Merge that one first"):
        read_adapter(folder, folder)
