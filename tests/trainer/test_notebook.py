"""A run in a notebook. IPython is not needed: what a cell would show is recorded."""

import re
import sys
from types import ModuleType

import pytest
import sft_runs
from online_runs import dataset, make_trainer
from transformers import PrinterCallback, TrainerCallback

from trl.trainer.display import show_progress
from trl.trainer.notebook import NotebookProgressCallback


@pytest.fixture
def cell(monkeypatch):
    """The pages that the output of a cell showed, one after the other."""
    pages = []

    class Output:
        update = staticmethod(pages.append)

    def display(page, display_id):
        assert display_id is True
        pages.append(page)
        return Output()

    module = ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return pages


def in_notebook(trainer):
    """What transformers adds in a notebook, and what becomes of it."""
    trainer.remove_callback(PrinterCallback)  # it would take a metric away
    added = type("NotebookProgressCallback", (TrainerCallback,), {})
    trainer.add_callback(added)
    show_progress(trainer)
    assert not any(type(x) is added for x in trainer.callback_handler.callbacks)
    (callback,) = [
        x for x in trainer.callback_handler.callbacks if isinstance(x, NotebookProgressCallback)
    ]
    return callback


def table(page):
    """The rows of a page, the header first."""
    rows = re.findall("<tr>(.*?)</tr>", page)
    return [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in rows]


def test_each_log_and_each_evaluation_is_a_row(tmp_path, cell):
    changes = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = make_trainer(
        tmp_path, beta=0.1, max_steps=2, eval_dataset={"a<b": dataset(["xy"])}, **changes
    )
    in_notebook(trainer)
    metrics = trainer.train().metrics
    header, *rows = table(cell[-1])
    names = ["loss", "lr", "grad_norm", "reward", "kl", "length"]
    assert header == ["step", "", *names]
    assert [row[:2] for row in rows] == [["1", ""], ["2", ""], ["2", "evaluation of a&lt;b"]]
    assert all(float(value) >= 0 for row in rows[:2] for value in row[3:])
    assert rows[2][3:5] == ["", ""], "an evaluation has no learning rate"
    assert "<progress" in cell[0] and 'max="2"' in cell[0]
    assert "<progress" not in cell[-1] and "step 2/2" in cell[-1]
    assert metrics["total_flos"] > 0


def test_an_evaluation_alone_and_a_table_without_evaluations(tmp_path, cell):
    trainer = sft_runs.make_trainer(tmp_path, eval_dataset=sft_runs.pairs())
    in_notebook(trainer)
    result = trainer.evaluate()
    assert {"eval_loss", "eval_runtime"} <= result.keys(), "nothing is taken out"
    assert table(cell[-1])[1][:2] == ["0", "evaluation"]
    trainer.train()
    header, row = table(cell[-1])
    assert header == ["step", "loss", "lr", "grad_norm", "accuracy"] and row[0] == "1"
