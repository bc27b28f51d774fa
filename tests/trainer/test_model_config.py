"""Options that describe the model."""

import sys

import pytest
import torch

from trl.trainer.model_config import (
    ModelConfig,
    check_adapter_options,
    get_peft_config,
    get_quantization_config,
)


def test_defaults_ask_for_a_whole_model_in_float32():
    config = ModelConfig()
    assert (config.dtype, config.model_revision, config.lora_r) == ("float32", "main", 16)
    assert get_peft_config(config) is None
    assert get_quantization_config(config) is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["all-linear"], "all-linear"),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        ("q_proj", ["q_proj"]),
        (["q_proj"], ["q_proj"]),
        ("q_proj, v_proj", ["q_proj", "v_proj"]),
        (["q_proj,v_proj"], ["q_proj", "v_proj"]),
        (["q_proj,", "v_proj"], ["q_proj", "v_proj"]),
        (r"layers\.\d{1,2}\.(q|v)_proj", r"layers\.\d{1,2}\.(q|v)_proj"),
        (None, None),
    ],
)
def test_target_modules_are_names_or_a_pattern(given, kept):
    assert ModelConfig(lora_target_modules=given).lora_target_modules == kept


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "exclude each other"),
        ({"dtype": "float23"}, "dtype='float23' must be one of auto, bfloat16, float16, float32"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4' must be one of nf4, fp4"),
        ({"lora_target_parameters": ["w"]}, r"with lora_dropout=0.05: .* Set lora_dropout=0"),
    ],
)
def test_contradictions(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**changes)


def test_every_adapter_option_reaches_peft():
    peft = pytest.importorskip("peft")
    config = ModelConfig(
        use_peft=True,
        lora_r=3,
        lora_alpha=5,
        lora_dropout=0.0,
        lora_target_modules=["q_proj", "v_proj"],
        lora_target_parameters=["experts.gate_up_proj"],
        lora_modules_to_save=["norm"],
        lora_task_type="SEQ_CLS",
        use_rslora=True,
        use_dora=False,
    )
    found = get_peft_config(config)
    assert isinstance(found, peft.LoraConfig)
    assert (found.r, found.lora_alpha, found.lora_dropout) == (3, 5, 0.0)
    assert found.target_modules == {"q_proj", "v_proj"}
    assert found.target_parameters == ["experts.gate_up_proj"]
    assert found.modules_to_save == ["norm"]
    assert (found.task_type, found.bias) == ("SEQ_CLS", "none")
    assert (found.use_rslora, found.use_dora) == (True, False)


def test_default_adapter():
    pytest.importorskip("peft")
    assert get_peft_config(ModelConfig(use_peft=True, lora_dropout=0.25)).lora_dropout == 0.25
    found = get_peft_config(ModelConfig(use_peft=True, use_dora=True))
    assert (found.r, found.lora_alpha, found.lora_dropout) == (16, 32, 0.05)
    assert (found.target_modules, found.target_parameters) == (None, None)
    assert (found.task_type, found.use_rslora, found.use_dora) == ("CAUSAL_LM", False, True)


@pytest.mark.parametrize("option", ["load_in_4bit", "load_in_8bit"])
def test_quantization_needs_bitsandbytes(option, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"bitsandbytes.*pip install 'trl\[quantization\]'"):
        get_quantization_config(ModelConfig(**{option: True}))


def test_an_adapter_needs_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"use_peft.*pip install 'trl\[peft\]'"):
        get_peft_config(ModelConfig(use_peft=True))


@pytest.fixture
def _bitsandbytes(tmp_path, monkeypatch):
    """An empty package of that name: describing a quantization runs nothing of it."""
    (tmp_path / "bitsandbytes.py").write_text("")
    info = tmp_path / "bitsandbytes-0.49.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.49.0\n")
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("bitsandbytes", None)


@pytest.mark.usefixtures("_bitsandbytes")
@pytest.mark.parametrize(
    ("dtype", "compute"),
    [("bfloat16", torch.bfloat16), ("auto", torch.float32), (None, torch.float32)],
)
def test_four_bits(dtype, compute):
    config = ModelConfig(
        load_in_4bit=True,
        dtype=dtype,
        bnb_4bit_quant_type="fp4",
        use_bnb_nested_quant=True,
        bnb_4bit_quant_storage="bfloat16",
    )
    found = get_quantization_config(config)
    assert (found.load_in_4bit, found.load_in_8bit) == (True, False)
    assert found.bnb_4bit_compute_dtype == compute
    assert found.bnb_4bit_quant_type == "fp4"
    assert found.bnb_4bit_use_double_quant is True
    assert found.bnb_4bit_quant_storage == torch.bfloat16


@pytest.mark.usefixtures("_bitsandbytes")
def test_eight_bits():
    found = get_quantization_config(ModelConfig(load_in_8bit=True))
    assert (found.load_in_4bit, found.load_in_8bit) == (False, True)


def test_adapter_options_without_an_adapter_are_refused():
    with pytest.raises(ValueError, match="lora_r=8, use_dora=True: no effect .* add --use_peft "):
        get_peft_config(ModelConfig(lora_r=8, use_dora=True))
    with pytest.raises(ValueError, match="lora_target_modules=.* add --use_peft "):
        get_peft_config(ModelConfig(lora_target_modules="all-linear"))
    # In Python a default value is no sign of use; on the command line it is.
    assert get_peft_config(ModelConfig(lora_r=16)) is None
    with pytest.raises(ValueError, match="^lora_r=16: no effect"):
        check_adapter_options(ModelConfig(lora_r=16), ["model_name_or_path", "lora_r"])
    check_adapter_options(ModelConfig(lora_r=8, use_peft=True), ["lora_r"])


def test_the_older_name_of_the_precision():
    with pytest.warns(FutureWarning, match="torch_dtype is now dtype"):
        assert ModelConfig(torch_dtype="bfloat16").dtype == "bfloat16"
