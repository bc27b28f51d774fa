"""The command `trl` itself."""

import contextlib
import json
import subprocess
import sys

import pytest
from workspace import environment, run_python, run_trl

import trl
from trl.cli.commands import ABSENT, COMMANDS
from trl.cli.main import main

COMPLETION = {"step": 0, "group": 0, "prompt": "a", "completion": "b", "finish": "stop"}
COMPLETION |= {"rewards": {"exact": 1.0}, "reward": 1.0, "advantage": 0.5}
MISSING = """try:
    main(['rloo', '--num_generation', '2', '--beta', 'x', '--num_processes', '2', '--loss_type'])
except SystemExit as end: assert end.code == 2
"""
HEAVY = "print(sorted({'torch', 'transformers', 'datasets', 'accelerate'} & set(sys.modules)))"


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(words, capsys):
    main(words)
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        assert f"  {name:<12} {command.summary}" in lines


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"{trl.__version__}\n"


def test_names_may_have_underscores(capsys):
    main(["online_dpo", "--help"])
    assert "usage: trl online-dpo [options]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("rlo", "Did you mean rloo?"),
        ("zzz", f"Commands: {', '.join(COMMANDS)}."),
    ],
)
def test_unknown_command(command, hint, capsys):
    with pytest.raises(SystemExit) as end:
        main([command])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"trl: error: unknown command {command!r}. {hint}\n"


@pytest.mark.parametrize("command", ABSENT)
def test_commands_that_are_not_there_yet(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--model_name_or_path", "x"])
    error = capsys.readouterr().err
    assert error.startswith(f"trl: error: `trl {command}` is not part of this release. Commands: ")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "env"])
def test_commands_have_a_help(command, capsys):
    with contextlib.suppress(SystemExit):  # argparse ends the process after its own help
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: trl {command} ")


LOADING = """
import sys
sys.modules["torch"] = None  # cannot be imported
from trl.cli.main import main
main(["sft", "--model_name_or_path", "some/model", "--dataset_name", "d", "--output_dir", "out"])
"""


def test_a_command_says_what_it_loads_before_it_loads_libraries(tmp_path):
    done = run_python(["-c", LOADING], tmp_path)
    assert done.stdout == "Loading some/model ...\n"
    assert "import of torch halted" in done.stderr


def test_words_come_from_the_process(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trl", "env"])
    main()
    assert "- TRL version: " in capsys.readouterr().out


def test_an_interrupt_is_no_traceback(monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("trl.cli.env.main", interrupt)
    with pytest.raises(SystemExit) as end:
        main(["env"])
    assert end.value.code == 130


@pytest.mark.parametrize(
    "code",
    [
        "import trl",
        "from trl.cli.main import main; main(['--help'])",
        "from trl.cli.main import main; main(['--version'])",
        "from trl.cli.main import main; main(['completions', 'c.jsonl'])",
        "from trl.cli.main import main; main(['rloo', '--help'])",
        "from trl.cli.main import main; main(['grpo', '--help-all'])",
        "from trl.cli.main import main; main(['lengths', '--help'])",
        "from trl.cli.main import main; main(['memory-plan', '--help-all'])",
        f"from trl.cli.main import main\n{MISSING}\n",
    ],
    ids=[
        *("import", "help", "version", "completions", "options", "all options", "preview"),
        *("all of a preview", "mistakes"),
    ],
)
def test_nothing_heavy_is_loaded(code, tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps(COMPLETION))
    done = run_python(["-c", f"import sys; {code}\n{HEAVY}"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_runs_the_command(tmp_path):
    done = run_trl(["rlooo"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "trl: error: unknown command 'rlooo'. Did you mean rloo?\n"


@pytest.mark.parametrize("buffers", [True, False])
def test_a_reader_that_ends_early_is_no_error(tmp_path, buffers):
    """As `trl completions c.jsonl | head -1` is."""
    (tmp_path / "c.jsonl").write_text(f"{json.dumps(COMPLETION)}\n" * 3000)
    words = [sys.executable, "-m", "trl", "completions", "c.jsonl", "--limit", "3000"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = environment(tmp_path) | {"PYTHONUNBUFFERED": "" if buffers else "1"}
    with subprocess.Popen(words, cwd=tmp_path, env=variables, **pipe) as run:
        assert run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 141
