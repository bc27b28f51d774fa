"""The benchmark programs: what they compute from measurements, and that each one starts."""

import json
import os
import subprocess
import sys
import tomllib
from itertools import pairwise

import pytest
from bench_rows import BENCH, COUNTING, loader, row, run  # noqa: F401
from workspace import ROOT, environment, run_forked

PROGRAMS = ("environments", "work", "memory", "step", "gpu", "gpu_check", "gpu_parts", "report")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_explains_itself(name, tmp_path):
    shown = run_forked([BENCH / f"{name}.py", "--help"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout


def test_the_certificate_finds_what_it_imports(tmp_path):
    """In a process of its own, as `make invariance` starts it."""
    words = [sys.executable, ROOT / "tests" / "invariance" / "certificate.py", "--help"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(tmp_path), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.mark.slow
def test_the_first_minutes_on_a_gpu_run_on_a_cpu(tmp_path):
    words = ["--device", "cpu", "--tiny", "--results", str(tmp_path)]
    done = run_forked([BENCH / "gpu_check.py", *words, "--parts", "equality", "head"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    results = {row["setting"]: row["runs"][-1] for row in found}
    precise, coarse = results["check equality"]["results"]
    assert precise["gradient apart"] <= 1e-5
    assert precise["same tokens"] == 1
    assert coarse["ok"] is True
    assert results["head"]["figures"], "a benchmark adds its own rows"
    assert "## First minutes" in (tmp_path / "gpu.md").read_text()


def test_what_the_check_needs_is_what_the_project_needs(load, monkeypatch):
    check = load("gpu_check")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {f"{name}>={floor}" for name, floor in check.floors().items()} <= {
        *project["dependencies"]
    }
    assert [*sorted(check.floors())] == sorted(check.NEEDED)
    # The machine that the check was made for.
    have = {"torch": "2.11.0+cu128", "transformers": "5.17.0", "accelerate": "1.15.0"}
    have["datasets"] = "5.2.0"
    monkeypatch.setattr(check, "version", have.get)
    assert check.missing() == []
    have["torch"] = "2.10.1+cu128"
    assert check.missing() == ["torch 2.10.1+cu128 is older than 2.11"]


def test_a_reward_rises_in_the_check(load):
    parts = load("gpu_parts")
    (learned,) = parts.learn(parts.tiny("cpu"))
    assert learned["after"] > learned["reward before"] + 0.05


def test_a_part_of_the_check_that_takes_too_long_leaves_what_it_printed(load, tmp_path):
    check, runs = load("gpu_check"), load("runs")
    code = "import time; print('{\"a\": 1}', flush=True); time.sleep(600)"
    part = check.Part("slow", "", 3, ("-c", code))
    store = runs.Store(tmp_path / "bench-test.json")
    found = check.run(part, 3, store, [])
    assert found["results"] == [{"a": 1}]
    assert found["error"].startswith("no end after 3 seconds")
    assert store.find("check slow", part)["runs"][-1]["results"] == [{"a": 1}]
    (runs.environments.BENCH / "bench-test.lock").unlink()


def test_peaks_growth_and_reduction(load):
    tables = load("tables")
    shape = {"prompt": 3100, "completion": 53}
    found = [
        row("a", run(1_000_000, 3_000_000, 2_000_000), prompt=3100),  # 2 and 53 are the defaults
        row("a", run(8_000_000), prompt=3100, completions=16),
        row("b", run(500_000), prompt=3100, vocabulary=9),
        row("b", [{"skipped": "why", "predicted": [7.5, 1.0]}], prompt=3100, completions=16),
        row("c", [{"error": "why"}], prompt=3100),
        row("d", run(1), prompt=3100, algorithm="GRPO"),
    ]
    rows = tables.Rows(found)
    assert rows.settings() == {"a", "b", "d"}
    peaks = tables.peak_table(rows, {"a": "A", "b": "B", "c": "C"}, (2, 16), **shape)
    assert peaks.splitlines() == [
        "| MB | k = 2 | k = 16 |",
        "| --- | ---: | ---: |",
        "| A | 2 | 8 |",
        "| B | 0 | (about 7,500) |",
    ]
    growth = tables.growth_table(rows, {"a": "A", "b": "B"}, **shape).splitlines()
    assert growth[2:] == ["| A | 4.00 | - |", "| B | - | - |"]
    bases = {"a times eight": ("a", 8.0), "missing": ("d", 1.0)}
    reduced = tables.reduction_table(rows, {"a": "A", "b": "B"}, bases, **shape, completions=2)
    assert reduced.splitlines()[2:] == ["| A | 2 | 8.0x | - |", "| B | 0 | 32.0x | - |"]
    assert rows.cell("c", **shape) == "failed"
    assert rows.cell("d", **shape) == "-"
    assert rows.cell("d", **shape, algorithm="GRPO") == "0"


def test_phases_come_from_the_last_step_and_peaks_from_all(load):
    tables = load("tables")
    steps = [{"tokens": {"scoring": 70}}, {"tokens": {"generation": 1200, "scoring": 30}}]
    peaks = {"generation": 5e6, "backward": 9e6}
    rows = tables.Rows([row("a", run(9e6, steps=steps, phase_peaks=peaks))])
    counted = tables.phase_table(rows, {"a": "A", "b": "B"}, "tokens").splitlines()
    assert counted[2:] == ["| A | 1,200 | 30 | 0 | 1,230 |"]
    held = tables.phase_table(rows, {"a": "A"}, "phase_peaks").splitlines()
    assert held[2] == "| A | 5 | 0 | 0 | 9 | 0 | 0 | 9 |"


def test_step_seconds_leave_out_the_first_step(load):
    step, tables = load("step"), load("tables")
    steps = [
        {"seconds": {"generation": 90.0, "scoring": 9.0}},
        {"seconds": {"generation": 1.0, "scoring": 2.0, "backward": 3.0}},
        {"seconds": {"generation": 2.0, "forward": 4.0, "backward": 5.0}},
    ]
    seconds = step.phase_seconds({"steps": steps})
    assert seconds == {
        "generation": 1.5,
        "scoring": 1.0,
        "forward": 2.0,
        "backward": 4.0,
        "training": 7.0,
        "total": 8.5,
    }
    assert tables.ratio_with_spread([1.0, 2.0, 4.0], [3.0, 4.0, 4.0]) == (2.0, 1.0, 3.0)


def test_a_result_file_keeps_what_it_had(load, tmp_path):
    runs = load("runs")
    store = runs.Store(tmp_path / "bench-test.json")
    work = runs.Work(completions=4, timeline=True)
    store.add("a", work, {"error": "out of memory"})
    store.add("a", work, {"peak": 3})
    store.add("a", runs.Work(completions=4), {"peak": 5})  # watched less closely: the same work
    store.add("b", work, {"peak": 7})
    again = runs.Store(tmp_path / "bench-test.json")
    assert [[r["peak"] for r in row["runs"]] for row in again.rows()] == [[3, 5], [7]]
    assert runs.peak_of(again.find("a", work)) == 4
    assert again.find("a", runs.Work(completions=8)) is None
    again.drop({"a"})
    assert [r["setting"] for r in store.rows()] == ["b"]
    (runs.environments.BENCH / "bench-test.lock").unlink()


def test_each_run_keeps_its_machine_and_its_commit(load, tmp_path):
    runs, tables = load("runs"), load("tables")
    path = tmp_path / "bench-test.json"
    old = {"cpu": "Old", "cores": 1, "memory_gb": 4, "system": "S", "python": "3"}
    path.write_text(json.dumps({"machine": old, "rows": [row("a", run(1, 2))]}))
    runs.Store(path).add("a", runs.Work(), {"peak": 3})
    found = json.loads(path.read_text())
    added = found["rows"][0]["runs"].pop()
    assert found == {"machine": old, "rows": [row("a", run(1, 2))]}, "what was there is kept"
    assert added == {"peak": 3, "machine": runs.machine(), "commit": runs.commit()}
    found["rows"][0]["runs"].append(added | {"machine": old | {"cpu": "New"}, "commit": "abc"})
    assert tables.provenance(found).splitlines() == [
        "Machine: Old, 1 cores, 4 GB, S, Python 3 (2 runs).",
        "Machine: New, 1 cores, 4 GB, S, Python 3 (1 runs).",
        "",
        "| commit of this project | runs |",
        "| --- | ---: |",
        "| not recorded | 2 |",
        "| abc | 1 |",
    ]
    (runs.environments.BENCH / "bench-test.lock").unlink()


def test_a_cell_too_large_is_predicted_from_half_of_it(load, tmp_path):
    memory, runs = load("memory"), load("runs")
    store = runs.Store(tmp_path / "bench-test.json")
    works = [memory.SETTINGS["first"].work(completions=count) for count in (2, 4, 8)]
    store.add("first", works[0], {"peak": 3_000_000_000, "seconds": {"forward": 90.0}})
    cell = memory.Cell("first", works[1])
    assert memory.predicted(store, cell) == (6.0, 3.0)
    limits = memory.argparse.Namespace(gb=5.0, minutes=60.0)
    memory.run_cell(store, cell, limits)
    assert store.find("first", works[1])["runs"][0]["skipped"].startswith("expected to take 6 GB")
    assert memory.predicted(store, memory.Cell("first", works[2])) == (12.0, 6.0)
    (runs.environments.BENCH / "bench-test.lock").unlink()


def test_thinned_timelines_keep_the_peak(load):
    meter = load("meter")
    events = [(i / 1000, (i * 7919) % 1009, "forward") for i in range(1000)]
    thinned = meter.thin(events, points=50)
    assert len(thinned) <= 51
    assert max(e[1] for e in thinned) == max(e[1] for e in events)
    assert meter.thin([]) == []


@COUNTING
def test_the_meter_counts_every_byte():
    code = """
import meter; meter.preload()
import torch
memory = meter.CpuBytes()
memory.reset()
memory.enter("scoring")
x = torch.empty(64, 4096)
y = torch.logsumexp(x, -1)  # beside input and output: exp(x - max) of x's size, and the maximum
del x, y
memory.enter("forward")
z = torch.empty(1000)
print(memory.peak(), memory.phase_peaks()["forward"])
"""
    script = ROOT / ".bench" / f"count-{os.getpid()}.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(code)
    try:
        done = subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(BENCH)},
        )
    finally:
        script.unlink()
    assert done.stdout.split() == [str(2 * 64 * 4096 * 4 + 2 * 256), "4000"], done.stderr


def test_the_report_is_written_from_results_alone(load, tmp_path):
    report = load("report")
    phases = {"generation": 1e6, "backward": 3e6}
    steps = [{name: {"forward": 8} for name in ("tokens", "seconds", "cpu_seconds")}]
    events = [[0.0, 5, "forward"], [1.0, 9, "backward"]]
    full = {"phase_peaks": phases, "steps": steps, "versions": {"trl": "0"}, "timeline": events}
    cell = {"prompt": 3100, "completions": 8}
    machine = {"cpu": "C", "cores": 2, "memory_gb": 4, "system": "S", "python": "3"}
    claims = {"prompt": 3020, "completion": 100}
    rows = [
        row("all", run(3_000_000, **full), **cell),
        row("first", run(9_000_000, **full), **cell),
        row("old", run(100_000_000), **claims),
        row("old", run(38_000_000), **claims, prompts="strings-1024"),
    ]
    (tmp_path / "memory.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    report.memory_report(tmp_path)
    text = (tmp_path / "memory.md").read_text()
    assert "| + bounded generation: all on | 3 | - | 3.0x | - | - |" in text
    assert "| 2, trl 0.20.0, vocabulary / 8 | 100 | 38 (-62 %) | - |" in text
    assert "| + bounded generation: all on, 8 rows at once | - | - | 1 | - | - | - |" in text
    charts = {path.name for path in tmp_path.glob("*.png")}
    assert {"peak_against_k.png", "memory_over_time.png", "tokens.png"} <= charts


def test_no_two_lines_of_a_chart_share_a_colour_and_no_two_names_a_place(load):
    charts, tables = load("charts"), load("tables")
    titles = {f"s{i}": f"setting {i}" for i in range(13)}
    runs = [run(1_000_000 + i // 2) for i in range(13)]
    rows = [row(s, r, prompt=3100) for s, r in zip(titles, runs, strict=True)]
    figure = charts.peak_figure(tables.Rows(rows), titles, [2, 4], [(3100, 53)])
    axis = figure.axes[0]
    colors = [line.get_color() for line in axis.lines]
    assert len(set(colors)) == len(colors) == len(titles) and not figure.legends
    assert {text.get_text(): text.get_color() for text in axis.texts} == dict(
        zip(titles.values(), colors, strict=True)
    )
    heights = sorted(text.xyann[1] for text in axis.texts)
    gaps = [above - below for below, above in pairwise(heights)]
    assert min(gaps) > 0.99 * charts.GAP and heights[-1] <= 1.0


def test_goals_are_judged_by_the_worst_cell_and_never_without_one(load, tmp_path):
    goals = load("goals")
    tokens = [{"steps": [{"tokens": {"forward": n}}]} for n in (10, 100)]
    rows = [
        row("default", run(90_000_000, **tokens[0]), prompt=3100, completions=8),
        row("default", run(50_000_000), completions=16),
        row("now-gpu", run(300_000_000, **tokens[1]), prompt=3100, completions=8),
        row("now-gpu", run(40_000_000), completions=16),
        # The best of each side counts: 50 against 40 above, 60 against 120 here.
        row("default", run(90_000_000), completions=8),
        row("lean", run(60_000_000), completions=8, micro_batch=1),
        row("now-gpu", run(180_000_000), completions=8),
        row("now-gpu", run(120_000_000), completions=8, micro_batch=1),
        row("default", run(10_000_000), prompt=3100, completions=64),
        row("now-gpu", run(20_000_000), prompt=3100, completions=64, micro_batch=1),
    ]
    seconds = [{"seconds": {"forward": 9.0}}, {"seconds": {"forward": 2.0}}]
    slow = [{"seconds": {"forward": 9.0}}, {"seconds": {"forward": 3.0}}]
    counted = {"tokens": {"forward": 1}}
    steps = [
        row(name, [{"peak": 1, "steps": [a, b | counted]}], prompt=128, completion=128)
        for name, (a, b) in (("this", seconds), (load("step").PEER, slow))
    ]
    (tmp_path / "memory.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "step.json").write_text(json.dumps({"rows": steps}))
    goals.goals_page(tmp_path)
    lines = (tmp_path / "goals.md").read_text().splitlines()
    assert "| peak(k=16) / peak(k=2), 3,100/53 | <= 1.1 | - | not measured |" in lines
    assert "| peak at 3,100/53/8, MB | <= 100 | 90 | met |" in lines
    worst = "| peak over trl 1.16.0, its GPU path, best settings of each: worst of 4 cells "
    assert f"{worst}(512/53/16) | <= 1 | 1.25 | missed |" in lines
    large = "| the same, prompts of 3,100 tokens and k >= 8: worst of 2 | <= 0.333 | 0.5 | missed |"
    assert large in lines
    assert "| tokens of an update at 3,100/53/8, over trl 1.16.0 | <= 0.125 | 0.1 | met |" in lines
    fast = "RLOO, scoring + training at 512/512/8, lengths / 4: times as fast"
    assert f"| {fast} | >= 1.5 | 1.5 | met |" in lines


def test_engines_are_compared_within_a_round(load):
    generation = load("generation")

    def timed(*seconds):
        return [{"generations": {"8": {"seconds": s, "processor": 2 * s}}} for s in seconds]

    runs = {"transformers": timed(1, 10), "vLLM server": timed(0.5, 2)}
    plain, server = generation.speed_rows(runs, 8, {"completion": 25})
    assert plain == ["transformers", "110", "20", "200", "1.00", "55", "10", "100", "1.00"]
    assert server == ["vLLM server", "250", "100", "400", "3.50", "125", "50", "200", "3.50"]
