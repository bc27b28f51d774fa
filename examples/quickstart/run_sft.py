"""Teach SmolLM2-135M-Instruct a format by `trl sft`, and show what it wrote before and after.

python examples/quickstart/run_sft.py
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.quickstart import evaluate, extraction, models, report

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "quickstart" / "extraction"
MODEL = ROOT / "quickstart" / "smollm2-135m-instruct"
SHOWN = 3


def main() -> None:
    """Prepare, write answers, train, write answers again, report."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    models.smollm2(MODEL)
    extraction.write(OUTPUT / "data")
    rows = [json.loads(x) for x in (OUTPUT / "data" / "test.jsonl").read_text().splitlines()]
    prompts, answers = ([row[name] for row in rows] for name in ("prompt", "completion"))
    started = time.perf_counter()
    before = evaluate.completions(MODEL, prompts, tokens=40)
    command = [sys.executable, "-m", "trl", "sft"]
    command += ["--config", "examples/cli_configs/sft_extraction.yaml"]
    print("$ python", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)
    after = evaluate.completions(OUTPUT / "run", prompts, tokens=40)
    logs = [json.loads(x) for x in (OUTPUT / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [log["eval_loss"] for log in logs if "eval_loss" in log]
    right = [extraction.right_json(texts, answers) for texts in (before, after)]
    summary = {
        "right_before": sum(right[0]) / len(rows),
        "right_after": sum(right[1]) / len(rows),
        "held_out_loss_before": losses[0],
        "held_out_loss_after": losses[-1],
        "seconds": round(time.perf_counter() - started, 1),
    }
    for prompt, first, last in list(zip(prompts, before, after, strict=True))[:SHOWN]:
        print(f"\n{prompt}\n  before:{first.splitlines()[0] if first.strip() else first!r}")
        print(f"  after: {last.splitlines()[0] if last.strip() else last!r}")
    report.write_summary(summary, OUTPUT / "summary.json")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
