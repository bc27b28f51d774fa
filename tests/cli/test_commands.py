from importlib import import_module

import pytest
from workspace import run_forked

from trl.cli.commands import COMMANDS, TRAINING, unknown_command

NEEDED = "--model_name_or_path, --dataset_name (or --datasets) and --reward_funcs "
NEEDED += "(or --reward_model_name_or_path) are required."


def mistakes(*words):
    command = TRAINING["rloo"]
    return command.errors(command.option_parser(), list(words))


def test_all_mistakes_are_found_at_once():
    found = mistakes("--num_generation", "4", "--beta", "x", "--top_k", "y", "--num_processes", "2")
    assert len(found) == 4
    assert found[0].startswith("unknown option --num_generation (closest: --num_generations, ")
    assert found[1].startswith("--beta: 'x' ") and found[2].startswith("--top_k: 'y' ")
    assert found[3] == NEEDED


def test_what_is_given_is_not_missed(tmp_path):
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\nreward_model_name_or_path: r\n")
    words = ["--config", str(tmp_path / "c.yaml")]
    assert mistakes(*words) == ["--dataset_name (or --datasets) is required."]
    assert mistakes(*words, "--dataset_name", "d", "--num_machines", "1") == []
    assert mistakes("--plan", "--step_time", "h100") == []  # the memory plan tells of its own


def test_help_begins_with_what_is_needed(capsys):
    TRAINING["grpo"].run(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: trl grpo [options]\n\ntrain with GRPO\n\nexample:\n")
    order = ["required:", "--model_name_or_path", "--reward_funcs", "common:", "--loss_type"]
    places = [shown.index(word, shown.index("required:")) for word in order]
    assert places == sorted(places)
    assert "--weight_decay" not in shown and "`trl grpo --help-all` lists all" in shown
    TRAINING["grpo"].run(["--help-all"])
    assert "--weight_decay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words", "listed", "left_out"),
    [
        (
            "lengths",
            [],
            ["--max_lengths", "--png", "--packing", "--dataset_name"],
            "--weight_decay",
        ),
        ("lengths", ["--method", "grpo"], ["--max_prompt_length"], "--packing"),
        ("memory-plan", [], ["--method", "--max_completion_length"], "--max_length "),
        ("memory-plan", ["--method", "sft"], ["--max_length "], "--max_completion_length"),
        ("memory-plan", ["--method", "sftt"], ["--max_completion_length"], "--max_length "),
    ],
)
def test_help_of_a_preview_is_short(capsys, name, words, listed, left_out):
    COMMANDS[name].run(["--help", *words])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: trl {name} [options]\n\n{COMMANDS[name].summary}\n\nexample:")
    assert len(shown.splitlines()) < 75  # those of training commands have 70
    assert all(option in shown for option in listed) and left_out not in shown
    assert shown.index("required:") < shown.index("options:") < shown.index("--method {")
    assert f"`trl {name} --help-all` lists all " in shown
    COMMANDS[name].run(["--help-all", *words])
    assert "--weight_decay" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lengths", "memory-plan"])
def test_the_example_of_a_preview_is_legal(name):
    command = COMMANDS[name]
    words = command.example.split()
    parsed = command.full_parser(words).read_with_errors(words)
    assert (parsed.errors, parsed.unknown) == ([], [])
    assert set(command.needed) <= set(parsed.values)


@pytest.mark.parametrize("name", TRAINING)
def test_the_example_has_no_mistakes(name):
    command = TRAINING[name]
    words = command.method.example.replace("\\\n", " ").split()
    assert command.errors(command.option_parser(), words) == []


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - TRAINING.keys()))
def test_other_commands_have_a_module(name):
    assert callable(import_module(COMMANDS[name].module).main)


def test_unknown_commands():
    assert unknown_command("rlo") == "unknown command 'rlo'. Did you mean rloo?"
    assert unknown_command("distillation").startswith(
        "`trl distillation` is not part of this release. Commands: sf"
    )


@pytest.mark.parametrize("words", [["-m", "trl.scripts.rloo", "--help"]])
def test_modules_that_accelerate_launches_have_the_same_help(words, tmp_path, capsys):
    done = run_forked(words, tmp_path)
    TRAINING["rloo"].run(["--help"])
    assert "".join(done.stdout.split()) == "".join(capsys.readouterr().out.split())
