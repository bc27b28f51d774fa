"""A folder with what a training command needs, and ways to run commands in it."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from forks import DEADLINE, Program
from tiny import save_tiny

from trl.cli.argv import launch_option_names
from trl.cli.values import ConversionError, convert
from trl.scripts import dpo, grpo, kto, online_dpo, ppo, reward, rloo, sft

ROOT = Path(__file__).resolve().parents[1]
REWARDS = """
def exact(completions, answer, **kwargs):
    return [float(str(right) in text) for text, right in zip(completions, answer)]
"""


def write_inputs(folder: Path) -> Path:
    """Write `tiny-model/`, `prompts.jsonl` and `preferences.jsonl` (8 rows) and `rewards.py`."""
    save_tiny(folder / "tiny-model")
    row = json.dumps({"prompt": "1+2=", "answer": "3"})
    (folder / "prompts.jsonl").write_text(f"{row}\n" * 8)
    pair = json.dumps({"prompt": "1+2=", "chosen": "3", "rejected": "4"})
    (folder / "preferences.jsonl").write_text(f"{pair}\n" * 8)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def environment(home: Path, path: Path = ROOT) -> dict[str, str]:
    """The environment of a command: no network, caches below `home`, imports from `path`."""
    return os.environ | {
        "HF_HOME": str(home / "hf-home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(path),
        "COLUMNS": "200",
    }


def run_python(
    words: list[str], folder: Path, path: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a folder and return what it printed."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(folder, path),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def run_forked(
    words: list[str | Path], folder: Path, vllm: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same in a process that has all libraries: for what does not depend on their import."""
    done = Program(words, folder, environment(folder) | variables, vllm).wait()
    return subprocess.CompletedProcess(words, done.status, done.output, done.errors)


def run_trl(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `trl WORDS` in a folder; it starts its workers as always."""
    return run_forked(["-m", "trl", *words], folder, **variables)


def run_trl_forked(
    words: list[str], folder: Path, vllm: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `trl WORDS` in a folder; its workers, too, are forked."""
    program = [ROOT / "tests" / "forked_workers.py", *words]
    return run_forked(program, folder, vllm, **variables)


def option_problems(config: dict[str, object]) -> list[str]:
    """What is wrong with a configuration file for a training command."""
    options = {}
    for command in (sft, dpo, kto, reward, grpo, rloo, online_dpo, ppo):
        options |= command.make_parser()._options
    others = launch_option_names() | {"accelerate_config", "env"}
    problems = []
    for name, value in config.items():
        if name not in options:
            problems += [] if name in others else [f"{name}: no option"]
            continue
        try:
            convert(value, options[name].annotation)
        except ConversionError as error:
            problems.append(f"{name}: {error}")
    return problems


def missing_from_help(parser) -> list[str]:
    """Options of the dataclasses of a parser that its help does not show."""
    text = "".join(parser.format_help().split())
    found = []
    for field in (f for kind in parser.dataclass_types for f in fields(kind) if f.init):
        described = "".join(str(field.metadata.get("help", "")).replace("%%", "%").split())
        if f"--{field.name}" not in text or described not in text:
            found.append(field.name)
    return found
