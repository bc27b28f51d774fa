"""`trl rloo` trains an adapter on a quantized model, from the options alone."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from workspace import run_trl_forked, write_inputs

WORDS = [
    *("rloo", "--model_name_or_path", "tiny-model", "--dataset_name", "prompts.jsonl"),
    *("--reward_funcs", "rewards.exact", "--output_dir", "out", "--num_generations", "4"),
    *("--max_completion_length", "6", "--max_steps", "2", "--learning_rate", "0.01"),
    *("--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear", "--lora_dropout", "0"),
    *("--use_cpu", "--bf16", "false", "--beta", "0.1", "--logging_steps", "1"),
    *("--report_to", "none"),
]
REWARD = """
def exact(completion_ids, **kwargs):
    return [sum(ids) % 13 for ids in completion_ids]
"""
FOUR = ["--load_in_4bit", "--use_bnb_nested_quant", "--bnb_4bit_quant_type", "nf4"]

pytestmark = pytest.mark.slow


def test_training_a_quantized_model(tmp_path):
    folder = write_inputs(tmp_path)
    (folder / "rewards.py").write_text(REWARD)
    done = run_trl_forked([*WORDS, *FOUR], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is_gradient_checkpointing" not in done.stderr, "what users can do nothing about"
    states = load_file(folder / "out" / "adapter_model.safetensors")
    assert all("lora_" in name for name in states)
    assert all(v.any() for name, v in states.items() if "lora_B" in name), "nothing was learned"
    history = json.loads((folder / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    kl = [entry["kl"] for entry in history["log_history"] if "kl" in entry]
    assert kl and all(abs(value) < 1 for value in kl)
    base = AutoModelForCausalLM.from_pretrained(
        folder / "tiny-model", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, folder / "out").train()(torch.arange(9)[None])[0]
    assert logits.isfinite().all()
