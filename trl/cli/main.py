"""The command `trl`."""

import os
import signal
import sys
from importlib import import_module

from .commands import COMMANDS, unknown_command
from .parser import INTERRUPTED


def main(argv: list[str] | None = None) -> int:
    """Run `trl ARGV`, by default with the arguments of this process; return 0 on success."""
    try:
        _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # for example, `head` in `trl completions output | head` has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    return 0


def _run(argv: list[str]) -> None:
    name = argv[0].replace("_", "-") if argv else "--help"
    if name in ("-h", "--help"):
        print("usage: trl COMMAND [options]\n\ncommands:")
        for command in COMMANDS.values():
            print(f"  {command.name:<12} {command.summary}")
        print("\noptions:\n  --version    print the version\n")
        print("`trl COMMAND --help` lists the options of a command.")
    elif name == "--version":
        print(import_module("trl").__version__)
    elif name in COMMANDS:
        COMMANDS[name].run(argv[1:])
    else:
        print(f"trl: error: {unknown_command(name)}", file=sys.stderr)
        raise SystemExit(2)
