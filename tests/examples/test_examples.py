"""The parts of the quickstart, and the configurations it trains with."""

import json
import re

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import ROOT, option_problems, write_inputs

from examples.quickstart import (
    addition,
    copying,
    evaluate,
    extraction,
    models,
    noise,
    report,
    run_preferences,
)
from trl.cli.commands import TRAINING
from trl.cli.train import find_reward

CONFIGS = sorted((ROOT / "examples" / "cli_configs").glob("*.yaml"))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("task", "sizes"),
    [(addition, (57, 24)), (copying, (2048, 128)), (extraction, (320, 32))],
    ids=["addition", "copying", "extraction"],
)
def test_splits_are_disjoint_and_always_the_same(task, sizes, tmp_path):
    task.write(tmp_path / "a")
    torch.manual_seed(1)
    task.write(tmp_path / "b")
    splits = [read(tmp_path / "a" / f"{name}.jsonl") for name in ("train", "test")]
    prompts = [[row["prompt"] for row in split] for split in splits]
    assert tuple(map(len, prompts)) == sizes
    assert not set(prompts[0]) & set(prompts[1])
    assert len(set(prompts[0] + prompts[1])) == sum(sizes)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_addition_rows_are_right():
    training, held_out = addition.pairs()
    for pair in [*training, *held_out]:
        row = addition.row(*pair)
        question = row["prompt"].splitlines()[-1]
        assert question == f"{pair[0]}+{pair[1]}="
        assert eval(question[:-1]) == int(row["answer"])
    for shot in addition.SHOTS.splitlines():
        question, answer = shot.split("=")
        assert eval(question) == int(answer)


def test_copying_rows_are_right(tmp_path):
    copying.write(tmp_path)
    for row in read(tmp_path / "train.jsonl"):
        assert row["prompt"] == f"{row['answer']}="
        assert len(row["answer"]) == 4


def test_extraction_rows_are_right(tmp_path):
    extraction.write(tmp_path)
    trained, held_out = (read(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    for row in trained + held_out:
        found = json.loads(row["completion"])
        hour = int(found["time"][:2])
        assert f"{(hour - 1) % 12 + 1} {'pm' if hour >= 12 else 'am'}" in row["prompt"]
        assert found["who"] in row["prompt"] and found["day"] in row["prompt"].lower()
        assert found["what"] in row["prompt"]
    people = [
        {json.loads(row["completion"])["who"] for row in rows} for rows in (trained, held_out)
    ]
    assert not people[0] & people[1]


def test_pairs_of_reminders_say_the_same_in_three_forms():
    trained = run_preferences.pairs(8, extraction.NAMES, seed=0)
    held_out = run_preferences.pairs(8, extraction.HELD_OUT, seed=1)
    assert not set(trained["prompt"]) & set(held_out["prompt"])
    for row in [*trained, *held_out]:
        said = set(re.findall(r"\w+", row["prompt"])) - {"Note", "Reminder", "on", "at", "with"}
        for name in ("chosen", "rejected"):
            assert set(re.findall(r"\w+", row[name])) - {"with"} == said
    assert [" with " in text for text in trained["rejected"]] == [True, False] * 4


def test_right_json():
    right = ' {"what": "call", "day": "mon"}'
    given = [right, '{"day": "mon", "what": "call"}\nNote: more', '{"what": "call"}', "a call", ""]
    assert extraction.right_json(given, [right] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_exact_sum():
    completions = ["5", " 5\n1+1=2", "55", "", "5 "]
    assert addition.exact_sum(completions, ["5"] * 5) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_right_digits():
    completions = ["1234", "1235", "123", "12345", "4321", ""]
    rewards = copying.right_digits(completions, ["1234"] * 6)
    assert rewards == [1.0, 0.75, 0.75, 1.0, 0.0, 0.0]


def test_random_reward_ignores_what_was_written():
    rewards = noise.random_reward(["same"] * 1000)
    assert set(rewards) == {0.0, 1.0}
    assert 0.4 < sum(rewards) / 1000 < 0.6


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    models.from_scratch(folder)
    return folder


def test_model_from_scratch_loads(scratch):
    model = AutoModelForCausalLM.from_pretrained(scratch)
    tokenizer = AutoTokenizer.from_pretrained(scratch)
    ids = tokenizer("12+34=")["input_ids"]
    assert tokenizer.decode(ids) == "12+34="
    assert len(ids) == 6
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert model.config.vocab_size == len(tokenizer) == 14
    assert model(torch.tensor([ids])).logits.shape == (1, 6, 14)


def test_model_from_scratch_is_always_the_same(scratch, tmp_path):
    models.from_scratch(tmp_path)
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() == (scratch / name).read_bytes()


def test_accuracies_average_the_reward(scratch, tmp_path):
    rows = [copying.row("1234"), copying.row("9876")]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen = []

    def reward(completions, answer):
        seen.append((completions, answer))
        return [float(right == "9876") for right in answer]

    found = evaluate.accuracies(scratch, tmp_path / "test.jsonl", reward, 3)
    assert found == {"sampled": 0.5, "greedy": 0.5}
    (sampled, answers), (greedy, _) = seen
    assert answers == ["1234"] * evaluate.SAMPLES + ["9876"] * evaluate.SAMPLES
    assert len(greedy) == 2
    assert all(len(text) <= 3 for text in sampled + greedy)


def write_run(folder, rewards):
    (folder / "completions").mkdir(parents=True)
    lines = [json.dumps({"step": step, "reward": reward}) for step, reward in rewards]
    (folder / "completions" / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_mean_rewards(tmp_path):
    run = write_run(tmp_path, [(1, 0.5), (0, 0.0), (0, 1.0), (1, 1.0), (0, 0.5)])
    assert list(report.mean_rewards(run).items()) == [(1, 0.5), (2, 0.75)]


def test_curve_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {name: write_run(tmp_path / name, [(0, 0.1), (1, 0.9)]) for name in ("a", "b")}
    report.draw_curve(runs, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_table_and_summary(tmp_path, capsys):
    names = [
        f"{run}{way}_{when}"
        for run in ("", "control_")
        for way in ("sampled", "greedy")
        for when in ("before", "after")
    ]
    summary = {name: place / 8 for place, name in enumerate(names)}
    report.show_table(summary, "what it means")
    shown = capsys.readouterr().out
    assert "what it means" in shown
    assert all(f"{value:.3f}" in shown for value in summary.values())
    report.write_summary(summary, tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_configurations_hold_options_of_the_right_types(path, tmp_path):
    config = yaml.safe_load(path.read_text())
    assert option_problems(config) == []
    command = TRAINING[path.stem.split("_")[0]]
    for name in config.get("reward_funcs", ()):
        assert callable(find_reward(name))
    # The launcher takes its own options out before the workers read theirs.
    own = {name: value for name, value in config.items() if name != "accelerate_config"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    words = ["--config", str(tmp_path / "own.yaml"), "--use_cpu"]
    script, training, *_ = command.make_parser().parse_args_and_config(words)
    assert script.dataset_name == config.get("dataset_name")
    assert training.learning_rate == config["learning_rate"]
    assert training.max_steps == config.get("max_steps", -1)


def test_configurations_fit_their_tasks():
    limits = {p.stem: yaml.safe_load(p.read_text()).get("max_completion_length") for p in CONFIGS}
    training, held_out = addition.pairs()
    longest = max(len(addition.row(*pair)["answer"]) for pair in [*training, *held_out])
    assert limits["rloo_copying"] == copying.LENGTH
    assert limits["rloo_addition"] >= longest


@pytest.mark.parametrize(
    ("config", "data"),
    [("dpo_ultrafeedback", "preferences.jsonl"), ("grpo_addition", "prompts.jsonl")],
)
def test_a_configuration_trains(config, data, tmp_path, monkeypatch):
    """One update of a tiny model, with fewer rows; everything else as the file says."""
    monkeypatch.chdir(write_inputs(tmp_path))
    command = config.split("_")[0]
    words = ["--config", str(ROOT / "examples" / "cli_configs" / f"{config}.yaml")]
    words += ["--model_name_or_path", "tiny-model", "--dataset_name", data, "--use_cpu"]
    words += ["--output_dir", "out", "--bf16", "false", "--max_steps", "1"]
    words += ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1"]
    monkeypatch.setattr("sys.argv", [f"trl {command}", *words])
    TRAINING[command].work()
    assert (tmp_path / "out" / "model.safetensors").exists()
    logs = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert logs[-1]["step"] == 1
