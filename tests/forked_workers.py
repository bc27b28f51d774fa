"""`forked_workers.py WORDS` is `trl WORDS`, and starts no other Python: its workers are forked.

The one worker of a training command, and the server of `trl vllm-serve`, are the process itself.
"""

import multiprocessing
import os
import runpy
import signal
import sys

from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from trl.cli.main import main


def become(program, words, variables):
    """What `python -m MODULE WORDS` would be, instead of it: `os.execve`."""
    module, *sys.argv[1:] = words[words.index("-m") + 1 :]
    os.environ.update(variables)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def work(options):
    """Instead of accelerate starting the one worker."""
    become(None, *prepare_simple_launcher_cmd_env(options))


class Worker:
    """One of several, with the methods of `subprocess.Popen` that torch's launcher calls."""

    def __init__(self, words, variables):
        self._process = fork.Process(target=self._run, args=(words, variables))
        self._process.start()
        self.pid = self._process.pid

    @staticmethod
    def _run(words, variables):
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the launcher's are another
            signal.signal(number, signal.SIG_DFL)
        become(None, words, variables)

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)


launch.simple_launcher = work
SubprocessHandler._popen = lambda handler, words, variables: Worker(words, variables)
os.execve = become
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork  # vLLM would spawn the process of its engine
main()
