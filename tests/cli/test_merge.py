"""`trl merge` on what trainers write: the same outputs, without peft."""

import json
import shutil

import dpo_runs
import kto_runs
import online_runs
import ppo_runs
import pytest
import reward_runs
import sft_runs
import torch
from peft import LoraConfig
from tiny import save_tiny
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from trl.cli.main import main

IDS = torch.arange(5, 45).view(2, 20)
BOUND = 5e-6  # largest difference in float32, relative to the largest entry
TRAINERS = {
    "SFT": sft_runs.make_trainer,
    "DPO": dpo_runs.make_trainer,
    "KTO": lambda folder, **changes: kto_runs.make_trainer(folder, ref_model=False, **changes),
    "Reward": reward_runs.make_trainer,
    "RLOO": online_runs.make_trainer,
    "PPO": lambda folder, **changes: online_runs.make_trainer(
        folder, ppo_runs.PPOTrainer, **ppo_runs.ONE_PASS, **changes
    ),
}


def train(name, folder, **changes):
    """Train a random adapter for a step; returns the trainer, which has written a checkpoint."""
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    base = save_tiny(folder / "base", initializer_range=0.2)
    changes = {"model": base, "peft_config": lora, "save_strategy": "steps"} | changes
    trainer = TRAINERS[name](folder / "out", save_steps=1, **changes)
    trainer.train()
    trainer.save_model()
    return trainer


def outputs(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def distance(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", TRAINERS)
def test_outputs_of_trainers(tmp_path, capsys, name):
    trainer = train(name, tmp_path)
    expected = outputs(trainer.model)
    kind = AutoModelForSequenceClassification if name == "Reward" else AutoModelForCausalLM
    for source in ("out", "out/checkpoint-1"):
        merged = tmp_path / "merged"
        capsys.readouterr()
        main(["merge", str(tmp_path / source), "--output_dir", str(merged)])
        size = sum(p.numel() for p in kind.from_pretrained(merged).parameters()) / 1e6
        expected_line = f"{merged}: {size:,.1f} million weights in float32, merged into "
        assert capsys.readouterr().out == f"{expected_line}{tmp_path / 'base'}\n"
        assert distance(outputs(kind.from_pretrained(merged)), expected) <= BOUND


def test_a_run_on_quantized_weights(tmp_path, capsys):
    """Its settings say so, and the weights that are merged into are rounded alike."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    trainer = train("DPO", tmp_path, quantization_config=four)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["quantization"]["load_in_4bit"] is True
    main(["merge", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")])
    assert "was trained on a base model in 4 bits" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert distance(outputs(merged), outputs(trainer.model)) <= BOUND


def test_a_base_model_that_was_moved(tmp_path, capsys):
    expected = outputs(train("SFT", tmp_path).model)
    shutil.move(tmp_path / "base", tmp_path / "moved")
    words = ["merge", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(words)
    error = capsys.readouterr().err
    assert end.value.code == 2 and len(error.splitlines()) == 1
    assert "if it was moved, give its folder as --base_model. The model" in error
    assert not (tmp_path / "merged").exists()
    main([*words, "--base_model", str(tmp_path / "moved"), "--dtype", "bfloat16"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert distance(outputs(merged).float(), expected) <= 0.05


def test_large_models_are_written_in_shards_and_old_shards_go(tmp_path, monkeypatch):
    train("SFT", tmp_path)
    words = ["merge", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")]
    main([*words, "--max_shard_size", "50KB"])
    shards = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) > 1 and (tmp_path / "merged" / "model.safetensors.index.json").exists()
    before = outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    main(words)
    assert [path.name for path in (tmp_path / "merged").glob("*.safetensors*")] == [
        "model.safetensors"
    ]
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), before)
