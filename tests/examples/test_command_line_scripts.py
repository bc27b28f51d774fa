"""The example scripts that take options as `trl` does train a tiny model."""

import json
import runpy
import sys

import pytest
from safetensors.torch import load_file
from workspace import ROOT, write_inputs

OPTIONS = ["--max_steps", "1", "--learning_rate", "0.1", "--use_cpu", "--bf16", "false"]
OPTIONS += ["--report_to", "none", "--output_dir", "output", "--model_name_or_path", "tiny-model"]
ONLINE = ["--max_completion_length", "4", "--num_generations", "2", "--shuffle_dataset", "false"]
TEXTS = ["--dataset_name", "json", "--data_files", "texts.jsonl", "--eval_share", "0.2"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rloo", ["--beta", "0.5", *ONLINE]),
        ("grpo", ["--dataset_name", "prompts.jsonl", *ONLINE]),
        ("sft", TEXTS),
    ],
)
def test_a_script_trains(tmp_path, monkeypatch, name, options):
    monkeypatch.chdir(write_inputs(tmp_path))
    rows = [json.dumps({"text": f"{i} and {i}"}) for i in range(10)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    path = ROOT / "examples" / "scripts" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *OPTIONS, *options])
    runpy.run_path(str(path), run_name="__main__")
    before, after = (load_file(f"{x}/model.safetensors") for x in ("tiny-model", "output"))
    assert before.keys() == after.keys()
    logs = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").open()]
    assert logs[-1]["step"] == 1
    if name == "sft":  # rewards of a tiny model may all be the same
        assert any((before[key] != after[key]).any() for key in before)
        assert any("eval_loss" in log for log in logs)
    else:
        lines = (tmp_path / "output" / "completions" / "train.jsonl").read_text().splitlines()
        assert len(lines) == 8
