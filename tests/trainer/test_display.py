"""Each trainer has the one display that suits where its output goes."""

import pytest
from online_runs import make_trainer
from transformers import PrinterCallback, ProgressCallback

from trl.trainer.progress_callbacks import PlainProgressCallback, RichProgressCallback


@pytest.mark.parametrize(
    ("in_terminal", "changes", "expected"),
    [
        (True, {}, RichProgressCallback),
        (False, {}, PlainProgressCallback),
        (False, {"disable_tqdm": True}, PrinterCallback),
    ],
)
def test_every_trainer_has_one_display(tmp_path, monkeypatch, in_terminal, changes, expected):
    monkeypatch.setattr("sys.stdout.isatty", lambda: in_terminal)
    trainer = make_trainer(tmp_path, **{"disable_tqdm": False} | changes)
    shows = {RichProgressCallback, PlainProgressCallback, PrinterCallback, ProgressCallback}
    assert [type(x) for x in trainer.callback_handler.callbacks if type(x) in shows] == [expected]
