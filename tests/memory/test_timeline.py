import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers.utils import logging

from trl.memory.meter import PHASES, PhaseEvent
from trl.memory.timeline import Timeline, draw, spans
from trl.step_lines import StepLines

ROOT = Path(__file__).resolve().parents[2]


def event(phase, start, end, peak=1e9):
    return PhaseEvent(phase, start, end, {"peak": peak, "fragmentation": 0.5})


def test_one_line_for_each_phase_at_once(tmp_path):
    timeline = Timeline(tmp_path / "run" / "memory.jsonl")
    timeline.step = 1
    timeline.add(event("generation", 5.0, 6.5))
    expected = {
        "step": 1,
        "phase": "generation",
        "start": 0.0,
        "end": 1.5,
        "peak_gb": 1.0,
        "fragmentation": 0.5,
    }
    assert [json.loads(line) for line in timeline.path.read_text().splitlines()] == [expected]
    timeline.step = 2
    timeline.add(event("forward", 7.0, 9.0, peak=3e9))
    second = list(StepLines(timeline.path).read())[1]
    assert (second["step"], second["start"], second["end"], second["peak_gb"]) == (2, 2.0, 4.0, 3.0)
    timeline.close()
    timeline.add(event("forward", 9.0, 9.5))
    assert len(list(StepLines(timeline.path).read())) == 3


def test_other_processes_write_nothing(tmp_path):
    timeline = Timeline(tmp_path / "memory.jsonl", writes=False)
    timeline.add(event("generation", 0, 1))
    timeline.close()
    assert list(tmp_path.iterdir()) == []


def write(path, steps):
    timeline = Timeline(path)
    for place, step in enumerate(steps):
        timeline.step = step
        timeline.add(event("forward", place, place + 0.5))
    timeline.close()


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    path = tmp_path / "memory.jsonl"
    write(path, [1, 1, 2, 3])
    with path.open("a") as file:
        file.write('{"step": 3, "phase"')  # cut off by a kill
    assert [record["step"] for record in StepLines(path).read()] == [1, 1, 2, 3]
    timeline = Timeline(path, step=2)
    timeline.step = 3
    timeline.add(event("backward", 100.0, 101.0))
    records = list(StepLines(path).read())
    assert [record["step"] for record in records] == [1, 1, 2, 3]
    assert (records[3]["phase"], records[3]["start"], records[3]["end"]) == ("backward", 2.5, 3.5)


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "memory.jsonl"
    write(path, [1, 2])
    write(path, [1])
    assert len(list(StepLines(path).read())) == 1


def test_a_broken_line_ends_what_is_kept(tmp_path):
    path = tmp_path / "memory.jsonl"
    write(path, [1])
    path.write_text(path.read_text() + "no json\n")
    Timeline(path, step=5)
    assert [record["step"] for record in StepLines(path).read()] == [1]
    assert path.read_text().count("\n") == 1


def test_lines_survive_a_kill(tmp_path):
    path = tmp_path / "memory.jsonl"
    code = (
        "import os, signal\n"
        "from trl.memory.meter import PhaseEvent\n"
        "from trl.memory.timeline import Timeline\n"
        f"timeline = Timeline({str(path)!r})\n"
        "for i in range(3):\n"
        "    timeline.add(PhaseEvent('rewards', i, i + 1, {'peak': 7e9}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert [(r["start"], r["end"], r["peak_gb"]) for r in StepLines(path).read()] == [
        (0.0, 1.0, 7.0),
        (1.0, 2.0, 7.0),
        (2.0, 3.0, 7.0),
    ]


def test_spans_by_phase_and_many_joined():
    records = [{"phase": "forward", "start": i, "end": i + 0.5, "peak_gb": i} for i in range(2500)]
    records += [{"phase": "rewards", "start": 9, "end": 10, "peak_gb": 1}]
    records += [{"phase": "scoring", "start": 0, "end": 1}]  # nothing measured
    found = spans(iter(records))
    assert found["rewards"] == [(9, 10, 1)]
    assert found["forward"][:2] == [(0, 2.5, 2), (3, 5.5, 5)]
    assert len(found["forward"]) == 834 and found["forward"][-1] == (2499, 2499.5, 2499)
    assert "scoring" not in found


def test_chart_shows_each_phase_at_its_peak(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    jsonl, png = tmp_path / "memory.jsonl", tmp_path / "memory.png"
    timeline = Timeline(jsonl)
    timeline.add(event("generation", 0, 50, peak=8e9))
    timeline.add(event("generation", 50, 100, peak=8e9))
    timeline.add(event("optimizer", 100, 110, peak=2e9))
    timeline.add(event("optimizer", 140, 150, peak=2e9))
    stroke, height = {}, {}
    assert draw(jsonl, png) is True
    pixels = image.imread(png)[..., :3] * 255
    for phase, color in (("generation", (31, 119, 180)), ("optimizer", (140, 86, 75))):
        near = abs(pixels - color).max(axis=2) < 2
        stroke[phase] = near.sum(axis=1).argmax()  # the row with the longest stroke of this color
        assert near[stroke[phase]].sum() > 200, phase
        # Each phase has a panel of its own: what it fills begins at its stroke.
        filled = abs(pixels - (0.2 * np.array(color) + 0.8 * 255)).max(axis=2) < 2
        height[phase] = filled.sum(axis=0).max()
    assert height["generation"] == pytest.approx(4 * height["optimizer"], rel=0.15)
    assert stroke["generation"] + height["generation"] < stroke["optimizer"]


@pytest.mark.parametrize("count", [1, 6])
def test_chart_of_any_number_of_phases(tmp_path, count):
    pytest.importorskip("matplotlib")
    timeline = Timeline(tmp_path / "memory.jsonl")
    for place, phase in enumerate(PHASES[:count]):
        timeline.add(event(phase, place, place + 1))
    assert draw(timeline.path, tmp_path / "memory.png") is True


def test_without_matplotlib_the_log_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    class Absent:
        @staticmethod
        def find_spec(name, *ignored):
            if name.partition(".")[0] == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    write(tmp_path / "memory.jsonl", [1])
    logging.enable_propagation()
    assert draw(tmp_path / "memory.jsonl", tmp_path / "memory.png") is False
    logging.disable_propagation()
    assert "pip install 'trl[quickstart]'" in caplog.text
    assert not (tmp_path / "memory.png").exists()


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "memory.jsonl").write_text("")
    assert draw(tmp_path / "memory.jsonl", tmp_path / "memory.png") is False
    assert not (tmp_path / "memory.png").exists()
