"""Teach SmolLM2-135M-Instruct a format with `trl sft`, and show answers before and after.

python examples/quickstart/run_sft.py
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.quickstart import evaluate, extraction, models, report

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "quickstart" / "extraction"
MODEL = ROOT / "quickstart" / "smollm2-135m-instruct"
PRINTED_ANSWERS = 3


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def first_line(text: str) -> str:
    """Return the first line of an answer; of an empty answer, its literal."""
    return text.splitlines()[0] if text.strip() else repr(text)


def main() -> None:
    """Let the model answer, train it, let it answer again, and report."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    models.smollm2(MODEL)
    extraction.write(OUTPUT / "data")
    rows = read_json_lines(OUTPUT / "data" / "test.jsonl")
    prompts = [row["prompt"] for row in rows]
    answers = [row["completion"] for row in rows]
    start_time = time.perf_counter()
    before = evaluate.completions(MODEL, prompts, tokens=40)
    command = [sys.executable, "-m", "trl", "sft"]
    command += ["--config", "examples/cli_configs/sft_extraction.yaml"]
    print("$ python", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)
    after = evaluate.completions(OUTPUT / "run", prompts, tokens=40)
    logs = read_json_lines(OUTPUT / "run" / "metrics.jsonl")
    losses = [log["eval_loss"] for log in logs if "eval_loss" in log]
    summary = {
        "right_before": sum(extraction.right_json(before, answers)) / len(rows),
        "right_after": sum(extraction.right_json(after, answers)) / len(rows),
        "held_out_loss_before": losses[0],
        "held_out_loss_after": losses[-1],
        "seconds": round(time.perf_counter() - start_time, 1),
    }
    for index in range(PRINTED_ANSWERS):
        print(f"\n{prompts[index]}")
        print(f"  before:{first_line(before[index])}")
        print(f"  after: {first_line(after[index])}")
    report.write_summary(summary, OUTPUT / "summary.json")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
