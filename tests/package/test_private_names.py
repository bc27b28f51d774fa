"""Private names of other libraries: all are listed, and those of `transformers.Trainer` hold."""

import ast
import inspect
import re
import sys
from importlib import import_module

import pytest
from transformers import Trainer
from workspace import ROOT

sys.path.append(str(ROOT / "scripts"))

import check_private as private

# Parameters, besides self, of the methods that trainers here override or call, in all releases that
# are supported.
PARAMETERS = {
    "_get_collator_with_removed_columns": ["data_collator", "description"],
    "_get_dataloader": [
        *("dataset", "description", "batch_size"),
        *("sampler_fn", "is_training", "dataloader_key"),
    ],
    "_get_grad_norm": ["model", "grad_norm"],
    "_get_output_dir": ["trial"],
    "_init_training_state": [
        *("max_steps", "num_update_steps_per_epoch", "num_train_epochs"),
        *("resume_from_checkpoint", "trial"),
    ],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_rng_state": ["checkpoint"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_prepare_context_parallel_inputs": ["model", "inputs"],
    "_prepare_inputs": ["inputs"],
    "_push_from_checkpoint": ["checkpoint_folder"],
    "_save": ["output_dir", "state_dict"],
    "_save_checkpoint": ["model", "trial"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_save_rng_state": ["output_dir"],
    "_track_num_input_tokens": ["inputs"],
}
# Attributes that trainers here read and write.
STATE = ("_globalstep_last_logged", "_signature_columns", "_total_loss_scalar", "_tr_loss")
SOURCE = inspect.getsource(Trainer)
TABLE = private.ROW.findall((ROOT / "CONTRIBUTING.md").read_text())


def trainers():
    """Files below trl/trainer, and the classes in them that derive from the Trainer."""
    for path in sorted((ROOT / "trl" / "trainer").rglob("*.py")):
        file = path.relative_to(ROOT)
        module = import_module(".".join(file.with_suffix("").parts))
        kinds = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Trainer)]
        yield file.as_posix(), [kind for kind in kinds if kind.__module__ == module.__name__]


TRAINERS = {file: kinds for file, kinds in trainers() if kinds}


def test_all_that_is_used_is_listed(capsys):
    found = private.main(ROOT / "trl", ROOT / "CONTRIBUTING.md")
    assert found == 0, capsys.readouterr().out


def test_names_shared_with_the_trainer_are_listed():
    """An own method of the same name would replace the Trainer's by accident."""
    of_trainer = {*dir(Trainer), *re.findall(r"self\.(_\w+) =", SOURCE)}
    shared = set()
    for file in TRAINERS:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = {getattr(node, "attr", ""), getattr(node, "name", "")}
            names.add(node.value if isinstance(node, ast.Constant) else "")
            shared |= {(file, name) for name in names & of_trainer if private.is_private(name)}
    rows = [(names, file) for names, file, _ in TABLE if file in TRAINERS]
    listed = {(file, name) for names, file in rows for name in re.findall(r"`(\w+)`", names)}
    assert shared == listed
    assert {name for _, name in listed} == {*PARAMETERS, *STATE}


@pytest.mark.parametrize("name", PARAMETERS)
def test_methods_of_the_trainer_have_the_parameters_that_are_expected(name):
    """And the Trainer itself calls them, with what an override here accepts."""
    signature = inspect.signature(getattr(Trainer, name))
    assert [*signature.parameters][1:] == PARAMETERS[name]
    assert f"self.{name}(" in SOURCE
    for kinds in TRAINERS.values():
        for kind in (kind for kind in kinds if name in vars(kind)):
            own = inspect.signature(vars(kind)[name])
            own.bind("self", *PARAMETERS[name])
            values = [x for x in own.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
            names = [x.name for x in values][1:]
            assert names == PARAMETERS[name][: len(names)], kind


@pytest.mark.parametrize("name", STATE)
def test_state_of_the_trainer_is_still_read_and_written(name):
    assert re.search(rf"self\.{name} [+-]?= ", SOURCE)
    assert len(re.findall(rf"self\.{name}\b", SOURCE)) > 2


ROWS = """
| `_known`, `_other` | lib | `trl/a.py` | it is needed | `tests/test_a.py` |
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x._unknown", "trl/a.py:1: _unknown is private"),
        ("x._known.y._deep", "_deep is private"),
        ("from lib._hidden import y", "_hidden is private"),
        ("from lib import _hidden", "_hidden is private"),
        ("import lib.a._hidden", "_hidden is private"),
        ("getattr(x, '_hidden', None)", "_hidden is private"),
        ("require('lib._hidden.a', 'b')", "_hidden is private"),
        ("x._known", "does not use _other"),
        ("x._known, x._other", "there is no tests/test_a.py"),
    ],
)
def test_uses_that_are_caught(tmp_path, capsys, text, problem):
    assert check(tmp_path, text, ROWS, has_test="no tests" not in problem) > 0
    assert problem in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "x._known; x._other",
        "from ..a import _y\nx._known; x._other",
        "self._own; super()._own(); cls._own; x._known; x._other",
        "class A:\n    def _a(self): pass\n    def f(self, other): other._a(); x._known; x._other",
        "x.__class__; __name__; sys._getframe(1); row._replace(a=1); x._known; x._other",
        "getattr(x, name); 'a _sentence'; x._known; x._other",
    ],
)
def test_what_is_no_private_name_of_others(tmp_path, capsys, text):
    assert check(tmp_path, text, ROWS) == 0, capsys.readouterr().out


def check(folder, text, table, has_test=True):
    (folder / "trl").mkdir()
    (folder / "tests").mkdir()
    (folder / "trl" / "a.py").write_text(text)
    (folder / "TABLE.md").write_text(table)
    if has_test:
        (folder / "tests" / "test_a.py").write_text("")
    return private.main(folder / "trl", folder / "TABLE.md")
