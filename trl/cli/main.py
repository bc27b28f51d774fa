"""The command `trl`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import NoReturn

from ..text import did_you_mean

TRAINING = {"rloo": "train with RLOO", "grpo": "train with GRPO"}
OTHERS = {
    "memory-plan": "print how much memory a training command would take",
    "vllm-serve": "serve a model with vLLM for vllm_mode='server'",
    "completions": "show the completions a run wrote",
    "env": "print versions for a bug report",
}

INTERRUPTED = 128 + signal.SIGINT  # status of what Ctrl-C has ended


def main(words: list[str] | None = None) -> None:
    """Run `trl WORDS`.

    Args:
        words (`list[str]`, *optional*): None takes those of the process.
    """
    try:
        _run(list(sys.argv[1:] if words is None else words))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _run(words: list[str]) -> None:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help"):
        print(_help())
    elif command == "--version":
        print(import_module("trl").__version__)
    elif command in TRAINING:
        import_module("trl.cli.launch").launch(command, rest)
    elif command in OTHERS:
        import_module(f"trl.cli.{command.replace('-', '_')}").main(rest)
    else:
        _unknown(command)


def _help() -> str:
    lines = ["usage: trl COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<12} {text}" for name, text in (TRAINING | OTHERS).items()]
    lines += ["", "options:", "  --version    print the version"]
    lines += ["", "`trl COMMAND --help` lists the options of a command."]
    return "\n".join(lines)


def _unknown(command: str) -> NoReturn:
    names = [*TRAINING, *OTHERS]
    hint = did_you_mean(command, names, otherwise=f" Commands: {', '.join(names)}.")
    print(f"trl: error: unknown command {command!r}.{hint}", file=sys.stderr)
    raise SystemExit(2)
