"""`one_process.py WORDS`: `trl WORDS`, with the worker of a training command in one process."""

import os
import runpy
import sys

from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from trl.cli.main import main


def work(options):
    """Instead of starting another Python: become what it would be."""
    (_, _, module, *words), variables = prepare_simple_launcher_cmd_env(options)
    os.environ.update(variables)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


launch.simple_launcher = work
main()
