"""Training commands as a user runs them, on a tiny checkpoint."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
from workspace import run_python, run_trl_forked, write_inputs

from trl.cli.main import main

CONFIG = {
    "model_name_or_path": "tiny-model",
    "dataset_name": "data",
    "reward_funcs": ["rewards.exact"],
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 50,
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 8,
    "num_generations_eval": 4,
    "num_processes": 1,
    "report_to": "none",
}
WORDS = (
    *("rloo", "--config", "train.yaml", "--output_dir", "out", "--use_peft", "--lora_r", "4"),
    *("--lora_target_modules", "q_proj", "v_proj"),
)

pytestmark = pytest.mark.slow


def records(folder: Path, split: str) -> list[dict]:
    lines = (folder / "out" / "completions" / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def prompts(rows: list[dict], step: int) -> list[str]:
    return list(dict.fromkeys(row["prompt"] for row in rows if row["step"] == step))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One optimizer step with an adapter, from a YAML file and options that overrule it."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    (folder / "data").mkdir()
    for split, count in (("train", 8), ("test", 2)):
        rows = [json.dumps({"prompt": f"{i}+2=", "answer": str(i + 2)}) for i in range(count)]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "train.yaml").write_text(yaml.safe_dump(CONFIG))
    done = run_python(["-m", "trl", *WORDS, "--max_steps", "1"], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def first(folder) -> list[dict]:
    """The training completions of the first run."""
    return records(folder, "train")


@pytest.fixture(scope="module")
def resumed(folder, first) -> list[dict]:
    """The training completions after the run was resumed for a second step."""
    done = run_trl_forked([*WORDS, "--max_steps", "2", "--resume_from_checkpoint", "true"], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return records(folder, "train")


def test_every_completion_is_written(folder, first):
    assert [row["group"] for row in first] == [0] * 4 + [1] * 4
    assert {row["step"] for row in first} == {0}  # one step, as the command line said
    assert all(row["rewards"] == {"exact": row["reward"]} for row in first)
    answers = {f"{i}+2=": str(i + 2) for i in range(8)}
    assert all(row["reward"] == float(answers[row["prompt"]] in row["completion"]) for row in first)
    assert sorted({row["prompt"] for row in records(folder, "eval")}) == ["0+2=", "1+2="]


def test_the_adapter_loads(folder, first, monkeypatch):
    monkeypatch.chdir(folder)  # the adapter names its base by the relative path of the command
    model = AutoPeftModelForCausalLM.from_pretrained("out")
    tokenizer = AutoTokenizer.from_pretrained("out")
    config = model.peft_config["default"]
    assert (config.r, set(config.target_modules)) == (4, {"q_proj", "v_proj"})
    with torch.no_grad():
        logits = model(**tokenizer("1+2=", return_tensors="pt")).logits
    assert logits.shape[:2] == (1, 4)
    assert logits.isfinite().all()


def test_completions_are_shown(folder, first, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["completions", str(folder / "out"), "--step", "0", "--limit", "3"])
    shown = capsys.readouterr().out
    assert all(row["completion"].split("\n")[0] in shown for row in first[:3])
    assert "; 5 more match, see --limit" in shown


def test_resuming_goes_on_with_the_next_prompts(folder, first, resumed):
    state = json.loads((folder / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert resumed[: len(first)] == first
    order = torch.randperm(8, generator=torch.Generator().manual_seed(42)).tolist()
    expected = [f"{i}+2=" for i in order[:4]]
    assert prompts(resumed, 0) + prompts(resumed, 1) == expected


def test_a_mistake_is_one_line(folder, first):
    done = run_trl_forked([*WORDS, "--num_generations", "3"], folder)
    assert done.returncode == 2
    # Importing bitsandbytes says that a kernel is missing.
    (line,) = [x for x in done.stderr.splitlines() if "gemm_4bit_forward" not in x]
    assert line.startswith("trl rloo: error: ")
    assert "--num_generations 3" in line
    assert "Nearest legal" in line


def test_supervised_fine_tuning(tmp_path):
    """Trained, evaluated, resumed and saved, from a local file with packs of documents."""
    write_inputs(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": f"{i}+2=", "completion": str(i + 2)}) for i in range(8)]
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    words = ["sft", "--model_name_or_path", "tiny-model", "--dataset_name", "data"]
    words += ["--output_dir", "out", "--report_to", "none", "--num_processes", "1", "--packing"]
    words += [
        "--max_length",
        "16",
        "--per_device_train_batch_size",
        "2",
        "--eval_strategy",
        "steps",
    ]
    words += ["--eval_steps", "1", "--save_steps", "1", "--learning_rate", "0.01"]
    for steps in ("1", "3"):
        resume = ["--resume_from_checkpoint", "true"] if steps == "3" else []
        done = run_trl_forked([*words, "--max_steps", steps, *resume], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "SFT." in (tmp_path / "out" / "checkpoint-3" / "README.md").read_text()
