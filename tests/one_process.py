"""`one_process.py WORDS` is `trl WORDS` in one process, which starts no other Python.

The worker of a training command and the server of `trl vllm-serve` are that process, or forked.
"""

import multiprocessing
import os
import runpy
import sys

from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from trl.cli.main import main


def become(program, words, variables):
    """What `python -m MODULE WORDS` would be, instead of it: `os.execve`."""
    _, _, module, *sys.argv[1:] = words
    os.environ.update(variables)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def work(options):
    """Instead of accelerate starting the one worker."""
    become(None, *prepare_simple_launcher_cmd_env(options))


launch.simple_launcher = work
os.execve = become
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork  # vLLM would spawn the process of its engine
main()
