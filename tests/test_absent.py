import subprocess
import sys

import pytest

import trl
from trl.absent import UPSTREAM


def imported(name):
    with pytest.raises(ImportError) as error:
        exec(f"from trl import {name}", {})
    return str(error.value)


def test_names_of_upstream_say_that_they_are_not_there():
    trainers = ", ".join(name for name in trl.__all__ if name.endswith("Trainer"))
    end = f" It is not part of this release, whose trainers are {trainers}."
    assert imported("ORPOTrainer") == f"module 'trl' has no name 'ORPOTrainer'.{end}"
    assert imported("MergeModelCallback").endswith(end)
    with pytest.raises(AttributeError, match="'CPOConfig'. It is not part of this release"):
        trl.CPOConfig  # noqa: B018


def test_misspelled_names():
    assert imported("RLOTrainer").endswith("'RLOTrainer'. Did you mean RLOOTrainer?")
    assert imported("qqqq") == "module 'trl' has no name 'qqqq'."


def test_programs_may_ask_for_names():
    assert [name for name in UPSTREAM if hasattr(trl, name) or name in trl.__all__] == []


def test_submodules_are_imported_as_before():
    code = "from trl import text, trainer; print(text.__name__, trainer.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["trl.text", "trl.trainer"], done.stderr
