"""Sending tables to experiment trackers that are running."""

import json
import sys
from pathlib import Path

import pytest

from trl.trainer.base.trackers import log_table

COLUMNS = ["prompt", "reward", "extra"]
ROWS = [["a", 0.5, None], ["b", -1.0, [1, 2]]]


def test_wandb_receives_the_table(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="p") as run:
        log_table(["wandb"], COLUMNS, ROWS)
        tables = list(Path(run.dir).rglob("completions*.table.json"))
    assert len(tables) == 1
    written = json.loads(tables[0].read_text())
    assert written["columns"] == COLUMNS
    # Lists become text: wandb would refuse a column of several types.
    assert written["data"] == [["a", 0.5, None], ["b", -1.0, "[1, 2]"]]


def test_only_the_trackers_of_the_run_are_used(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="p") as run:
        log_table(["tensorboard"], COLUMNS, ROWS)
        log_table([], COLUMNS, ROWS)
        log_table(["wandb"], COLUMNS, [])
        tables = list(Path(run.dir).rglob("*.table.json"))
    assert tables == []


def test_trackio_receives_the_table(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    from trackio import context_vars, utils

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    assert tmp_path == utils.TRACKIO_DIR
    trackio.init(project="p", auto_log_gpu=False, auto_log_cpu=False)
    try:
        log_table(["trackio"], COLUMNS, ROWS)
    finally:
        trackio.finish()
    assert context_vars.current_run.get() is None
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("p")
    (entry,) = SQLiteStorage.get_logs("p", run)
    sent = entry["completions"]["_value"]
    assert sent == [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]


def test_trackers_without_a_run_are_left_alone():
    """Imported by something else: nothing is started and nothing fails."""
    wandb, trackio = pytest.importorskip("wandb"), pytest.importorskip("trackio")
    log_table(["wandb", "trackio"], COLUMNS, ROWS)
    assert wandb.run is None
    assert trackio.context_vars.current_run.get() is None


def test_absent_trackers_are_not_imported(monkeypatch):
    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    log_table(["wandb", "trackio"], COLUMNS, ROWS)
    assert not {"wandb", "trackio"} & set(sys.modules)
