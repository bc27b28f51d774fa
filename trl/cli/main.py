"""The command `trl`."""

import os
import signal
import sys
from importlib import import_module

from .commands import COMMANDS, unknown_command
from .parser import INTERRUPTED


def main(words: list[str] | None = None) -> int:
    """Run `trl WORDS`, by default those of the process; returns 0 if all went well."""
    try:
        _run(list(sys.argv[1:] if words is None else words))
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # of `trl completions output | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    return 0


def _run(words: list[str]) -> None:
    command, rest = (words[0].replace("_", "-"), words[1:]) if words else ("--help", [])
    if command in ("-h", "--help"):
        print("usage: trl COMMAND [options]\n\ncommands:")
        for known in COMMANDS.values():
            print(f"  {known.name:<12} {known.summary}")
        print("\noptions:\n  --version    print the version\n")
        print("`trl COMMAND --help` lists the options of a command.")
    elif command == "--version":
        print(import_module("trl").__version__)
    elif command in COMMANDS:
        COMMANDS[command].run(rest)
    else:
        print(f"trl: error: {unknown_command(command)}", file=sys.stderr)
        raise SystemExit(2)
