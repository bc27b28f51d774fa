import json
import sys
from datetime import date
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from distributed.engines import call as call_on_ranks

from trl.distributed import Ranks
from trl.generation.base import Generations
from trl.online.metrics import MetricStore
from trl.online.reports import (
    Reports,
    Round,
    log_table,
    print_table,
    tracker_rows,
)
from trl.transcripts import transcript
from trl.types import Prompts, RewardTable

NAN = torch.nan


def a_round(rows=(0, 1, 2, 3), **changes) -> Round:
    """Some of four rows: two prompts of two completions; the last one has no reward."""
    given = {
        "step": 3,
        "number": 1,
        "prompts": Prompts(
            messages=[f"p{row // 2}" for row in rows], token_ids=[[5] * 3 for _ in rows]
        ),
        "completions": [f"c{row}" for row in rows],
        "generations": Generations(
            completion_ids=[[7] * (row + 1) for row in rows],
            finish_reasons=["stop" if row % 2 else "length" for row in rows],
        ),
        "table": RewardTable(
            per_function=torch.tensor([[0.0, 1.0], [NAN, 2.0], [3.0, 4.0], [NAN, NAN]]),
            weights=torch.ones(2),
            total=torch.tensor([1.0, 2.0, 7.0, NAN]),
            names=("a", "b"),
            group_size=2,
        ),
        "extras": {"note": list(rows)},
        "advantages": torch.tensor([0.5, -0.5, 1.0, NAN]),
    }
    return Round(**given | changes)


def new_stores():
    return {"train": MetricStore(), "eval": MetricStore()}


def alone(value):
    return [value]


def written(folder, mode="train"):
    with (folder / "completions" / f"{mode}.jsonl").open() as file:
        return [json.loads(line) for line in file]


def test_records_by_hand():
    found = a_round(rows=(2, 3)).records(rank=1)
    assert found[0] == {
        "step": 3, "round": 1, "group": 1, "prompt": "p1", "completion": "c2",
        "completion_ids": [7, 7, 7], "finish": "length", "reward": 7.0, "advantage": 1.0,
        "rewards": {"a": 3.0, "b": 4.0}, "extra": {"note": 2},
    }  # fmt: skip
    assert found[1]["rewards"] == {"a": None, "b": None}
    assert found[1]["reward"] is None and found[1]["advantage"] is None


def test_what_rewards_add_to_records_is_valid_json_in_utf8():
    """Also before it is written: a terminal and trackers show the same."""
    extras = {"note": ["\ud83d", {"score": NAN}, torch.tensor(0.5), float("inf")]}
    found = a_round(extras=extras).records(rank=0)
    notes = [record["extra"]["note"] for record in found]
    assert notes == ["\ufffd", {"score": None}, 0.5, None]


def test_tokens_are_recorded_where_the_engine_reports_them():
    def texts(ids):
        return [f"<{token}>" for token in ids]

    generations = Generations(
        completion_ids=[[7, 8], [9]],
        finish_reasons=["stop"] * 2,
        sampling_logps=[[-0.12345, NAN], [-2.0]],
    )
    changes = {"rows": (0, 1), "generations": generations}
    found = a_round(**changes, token_texts=texts).records(rank=0)
    assert [record["tokens"] for record in found] == [
        [("<7>", -0.123), ("<8>", None)],
        [("<9>", -2.0)],
    ]
    assert "tokens" not in a_round(**changes).records(rank=0)[0], "not asked for"
    assert "tokens" not in a_round(rows=(0, 1), token_texts=texts).records(rank=0)[0], "not known"


def test_a_round_is_counted_recorded_and_written_by_mode(tmp_path):
    stores = new_stores()
    reports = Reports(str(tmp_path), Ranks(), stores)
    assert reports.add("train", a_round()) == 4 * 3 + 1 + 2 + 3 + 4
    assert reports.add("eval", a_round(step=4)) == 22
    assert [record["step"] for record in written(tmp_path)] == [3] * 4
    assert [record["step"] for record in written(tmp_path, "eval")] == [4] * 4
    found = stores["train"].flush(alone)
    assert found["reward"] == pytest.approx(10 / 3)
    assert found["completions/mean_length"] == 2.5
    assert found["completions/clipped_ratio"] == 0.5
    assert stores["train"].flush(alone) == {}, "forgotten"
    assert stores["eval"].flush(alone)["completions/max_length"] == 4


def test_tokens_of_tools_are_not_counted(tmp_path):
    generations = Generations(
        completion_ids=[[7] * 4] * 4,
        finish_reasons=["stop"] * 4,
        policy_mask=[[True, False, False, True]] * 4,
        tool_call_counts=[(1, 0), (1, 1), (0, 0), (0, 0)],
    )
    stores = new_stores()
    reports = Reports(str(tmp_path), Ranks(), stores)
    assert reports.add("train", a_round(generations=generations)) == 4 * (3 + 2)
    found = stores["train"].flush(alone)
    assert found["tools/call_frequency"] == 0.5 and found["completions/mean_length"] == 2


def work(folder):
    ranks, stores = Ranks(Accelerator(cpu=True)), new_stores()
    reports = Reports(folder, ranks, stores)
    tokens = reports.add("train", a_round(rows=(2 * ranks.rank, 2 * ranks.rank + 1)))
    reports.restart(4)
    taken = len(reports.take("train"))
    reward = stores["train"].flush(ranks.gather_objects)["reward"]
    return {"tokens": tokens, "taken": taken, "reward": reward}


@pytest.mark.distributed
def test_the_first_rank_alone_receives_and_writes_the_records_of_all(tmp_path):
    found = call_on_ranks(work, tmp_path)
    assert [rank["tokens"] for rank in found] == [22, 22]
    assert [rank["taken"] for rank in found] == [4, 0]
    assert found[0]["reward"] == found[1]["reward"] == pytest.approx(10 / 3)
    assert [record["completion"] for record in written(tmp_path)] == ["c0", "c1", "c2", "c3"]


# --- Completions ---


def record(step=0, prompt="p", completion="c", advantage=0.5, **extra):
    return {
        "step": step,
        "group": 0,
        "prompt": prompt,
        "completion": completion,
        "rewards": {"r": 1.0},
        "extra": extra,
        "advantage": advantage,
    }


def test_rounds_are_appended_and_taken_once(tmp_path):
    reports = Reports(str(tmp_path), Ranks(), new_stores())
    reports.add("train", a_round(step=0))
    reports.add("train", a_round(step=1))
    reports.add("eval", a_round(step=1))
    assert [r["step"] for r in written(tmp_path)] == [0] * 4 + [1] * 4
    assert {r["step"] for r in reports.take("train")} == {1} and reports.take("train") == []
    assert len(reports.take("eval")) == 4


def test_restart_drops_later_steps_and_broken_lines(tmp_path):
    reports = Reports(str(tmp_path), Ranks(), new_stores())
    for step in range(4):
        reports.add("train", a_round(step=step, completions=["line\u2028separator"] * 4))
    with (tmp_path / "completions" / "train.jsonl").open("a") as file:
        file.write('{"step": 1, "prom')
    for step in (1, 2, 3):
        reports.add("eval", a_round(step=step))
    reports.restart(2)
    assert [r["step"] for r in written(tmp_path)[::4]] == [0, 1]
    steps = [r["step"] for r in written(tmp_path, "eval")[::4]]
    assert steps == [1, 2], "evaluated before the checkpoint"


def test_table_shows_a_sample(capsys):
    records = [record(completion=f"text{i}", note="seen") for i in range(9)]
    print_table(records, step=5, count=2)
    shown = capsys.readouterr().out
    assert "Step 5" in shown and shown.count("text") == 2 and "seen" in shown and "0.50" in shown
    print_table(records, step=5, count=0)
    print_table([], step=5, count=None)
    assert "text" not in capsys.readouterr().out


def test_tracker_rows():
    records = [record(prompt="a", x=1), record(prompt="a", x=2), record(prompt="b", x=3)]
    columns, rows = tracker_rows(records, unique_prompts=False)
    assert columns == ["step", "prompt", "completion", "r", "x", "advantage"]
    assert rows[1] == [0, "a", "c", 1.0, 2, 0.5] and len(rows) == 3
    assert [row[1] for row in tracker_rows(records, unique_prompts=True)[1]] == ["a", "b"]
    assert tracker_rows([], False) == ([], [])


def test_values_json_does_not_have_are_written_as_text(tmp_path):
    added = {"when": [date(2024, 1, 2)] * 4}
    reports = Reports(str(tmp_path), Ranks(), new_stores())
    reports.add("train", a_round(completions=["\u00e9\n\U0001f600"] * 4, extras=added))
    found = written(tmp_path)[0]
    assert found["completion"] == "\u00e9\n\U0001f600"
    assert found["extra"] == {"when": "2024-01-02"}
    assert "\u00e9" in (tmp_path / "completions" / "train.jsonl").read_text(encoding="utf-8")


def test_messages_are_shown_with_their_roles(capsys):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert transcript(chat) == "system: s\nuser: hi"
    assert transcript("text") == "text"
    print_table([record(prompt=chat, advantage=None)], step=1, count=None)
    shown = capsys.readouterr().out
    assert "user: hi" in shown
    assert "0.50" not in shown


# --- Trackers ---

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
