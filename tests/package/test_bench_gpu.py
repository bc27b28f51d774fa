"""The benchmark for GPUs: what it says without one, and its page of measurements."""

import json
import os
import subprocess
import sys

from bench_rows import BENCH, loader, row, run  # noqa: F401
from workspace import ROOT


def test_without_a_gpu_it_says_what_it_would_measure():
    done = subprocess.run(
        [sys.executable, BENCH / "gpu.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU: skipped. On one, this measures the bounded head")


def test_the_page_for_gpus_has_every_part(load, tmp_path):
    step, gpu = load("step"), load("gpu")
    on_gpu = {"versions": {"gpu": "G"}}
    seconds = [{"seconds": {"generation": s, "forward": s}} for s in (9.0, 2.0)]
    for one in seconds:
        one |= {"cpu_seconds": one["seconds"], "tokens": {"forward": 8}}
    timed = on_gpu | {"steps": seconds}
    slow = on_gpu | {"steps": [{**seconds[1], "seconds": {"generation": 1.0, "forward": 6.0}}]}
    work = {"prompt": 512, "completion": 512, "completions": 8, "device": "cuda"}
    bf16 = {**work, "shape": "0.5b", "options": gpu.BF16}
    figures = [{"chunk": 4, "default": True, "ratios": [0.5], "peak": 2e9, "full_peak": 8e9}]
    head = gpu.HeadWork("8192,4096,128256", "cuda").identity()
    cache = {"held_before": 10**6, **timed}
    short = {"room": 3e6, "whole": 4e6, "small": 2e6, "difference": 1e-7}
    short |= {"failures": {"training": 2}, "pieces": {"training": 4}}
    rows = [
        row("lean", run(50_000_000, **on_gpu), prompt=3100, completions=8, device="cuda"),
        row("now", run(200_000_000, **on_gpu), prompt=3100, completions=8, device="cuda"),
        row("this", run(1, **timed), **bf16),
        row(step.PEER, run(2, **slow), **bf16),
        {"setting": "head", "work": head, "runs": run(2e9, figures=figures, **on_gpu)},
        row("empty_cache=never", run(3_000_000, scratch=8_000_000, **cache), **work),
        row("empty_cache=always", run(3_000_000, scratch=5_000_000, **cache), **work),
        row("shortage", run(1_000_000, **short, **on_gpu), **work),
    ]
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": rows}))
    load("gpu_report").gpu_page(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert text.splitlines()[2] == "Made by `make bench-gpu` on G."
    for line in (
        "on a GPU, best settings of each: worst of 1 cells (3,100/53/8) | <= 1 | 0.25 | met |",
        "| 0.5b, bfloat16 weights: RLOO, scoring + training at 512/512/8: times as fast | >= 1.5 "
        "| 3 | met |",
        "128,256, GB | <= 3 | 2 | met |",
        "times as fast as full logits | >= 0.97 | 2 | met |",
        "after running out of memory | <= 5e-06 | 1e-07 | met |",
        "### Random model of the shape 0.5b, bfloat16 weights",
        "| 8,192 x 4,096 x 128,256 | 4 (default) | 0.50 (0.50 to 0.50) | 2,000 | 8,000 | 4.0 |",
        '| `"never"` | 4 | 8 | 1.00 | 50.0 % | 4.000 | 1.00 |',
        '| `"always"` | 4 | 5 | 0.62 | 20.0 % | 4.000 | 1.00 |',
        "| 4 | 3 | 1 | 2 | training 2 | training 4 | 1.0e-07 |",
    ):
        assert line in text, line
    charts = {path.name for path in tmp_path.glob("*.png")}
    assert charts == {"gpu_peak_against_k.png", "gpu_step_time.png"}


def test_on_a_gpu_the_peer_has_no_path_to_imitate_and_both_sides_go_row_by_row(load):
    gpu = load("gpu")
    works = list(gpu.memory_works(gpu.Plan(), "cuda"))
    assert all(work.device == "cuda" and not work.gpu_path for _, work in works)
    by_row = {(name, work.completions) for name, work in works if work.micro_batch == 1}
    assert by_row == {(name, count) for name in ("lean", "now") for count in (2, 8)}
    assert {name for name, _ in works} >= {"old-full", "first", "now", "plain", "lean", "default"}
