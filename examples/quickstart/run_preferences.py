"""Let SmolLM2-135M-Instruct prefer one way of writing reminders, and show what it prefers.

python examples/quickstart/run_preferences.py                   # by DPO
python examples/quickstart/run_preferences.py --trainer kto     # or by KTO, or a reward model
"""

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trl
from examples.quickstart import extraction, models, report

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "quickstart" / "smollm2-135m-instruct"
# Trainer, options, learning rate, rows of a micro-batch, and what is compared of two answers.
TRAINERS: dict[str, tuple[Any, Any, float, int, str]] = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, 1e-5, 4, "logps"),
    "kto": (trl.KTOTrainer, trl.KTOConfig, 2e-5, 8, "logps"),
    "reward": (trl.RewardTrainer, trl.RewardConfig, 2e-5, 4, "scores"),
}


def pairs(rows: int, names: tuple[str, ...], seed: int) -> Dataset:
    """Notes with two reminders: one as wanted, and one that is likelier, or less likely, so far."""
    draw, found = random.Random(seed), []
    for row in range(rows):
        event, name, day = (draw.choice(x) for x in (extraction.EVENTS, names, extraction.DAYS))
        hour = draw.randint(1, 11)
        note = f"Note: {event} with {name} on {day} at {hour} pm\nReminder:"
        others = f" {event} with {name}: {day}, {hour} pm", f" {name}, {day}, {hour} pm: {event}"
        found.append({"prompt": note, "chosen": f" {day}, {hour} pm: {event} with {name}"})
        found[-1]["rejected"] = others[row % 2]
    return Dataset.from_list(found)


def accuracy(trainer: Any, test: Dataset, column: str) -> float:
    """Share of pairs whose chosen answer is the likelier, or better, one."""
    output = trainer.predict(test).predictions
    found = output[column] if isinstance(output, dict) else output
    return float((found[:, 0] > found[:, 1]).mean())


def main(method: str) -> None:
    """Prepare, measure, train, measure again, report."""
    trainer_class, config_class, learning_rate, rows, column = TRAINERS[method]
    output = ROOT / "quickstart" / f"preferences-{method}"
    shutil.rmtree(output, ignore_errors=True)
    models.smollm2(MODEL)
    test = pairs(32, extraction.HELD_OUT, seed=1)
    started = time.perf_counter(), time.process_time()
    args = config_class(
        str(output / "run"),
        max_steps=16,
        per_device_train_batch_size=rows,
        learning_rate=learning_rate,
        warmup_steps=3,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    train = pairs(64, extraction.NAMES, seed=0)
    trainer = trainer_class(str(MODEL), args=args, train_dataset=train)
    before = accuracy(trainer, test, column)
    trainer.train()
    summary = {"held_out_accuracy_before": before}
    summary |= {"held_out_accuracy_after": accuracy(trainer, test, column)}
    summary |= {"seconds": round(time.perf_counter() - started[0], 1)}
    summary |= {"processor_seconds": round(time.process_time() - started[1], 1)}
    report.write_summary(summary, output / "summary.json")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trainer", choices=TRAINERS, default="dpo")
    main(parser.parse_args().trainer)
