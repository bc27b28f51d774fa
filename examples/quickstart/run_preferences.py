"""Train SmolLM2-135M-Instruct to prefer one format of reminders, and measure what it prefers.

python examples/quickstart/run_preferences.py                   # DPO
python examples/quickstart/run_preferences.py --trainer kto     # KTO; also a reward model
"""

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trl
from examples.quickstart import extraction, models, report

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "quickstart" / "smollm2-135m-instruct"


@dataclass(frozen=True)
class Method:
    """A trainer, its options, and the prediction by which two answers are compared."""

    trainer_class: type[transformers.Trainer]
    config_class: type[transformers.TrainingArguments]
    learning_rate: float
    batch_size: int
    prediction: str


METHODS = {
    "dpo": Method(trl.DPOTrainer, trl.DPOConfig, 1e-5, batch_size=4, prediction="logps"),
    "kto": Method(trl.KTOTrainer, trl.KTOConfig, 2e-5, batch_size=8, prediction="logps"),
    "reward": Method(trl.RewardTrainer, trl.RewardConfig, 2e-5, batch_size=4, prediction="scores"),
}


def pairs(rows: int, names: tuple[str, ...], seed: int) -> Dataset:
    """Make notes with two reminders each: one in the preferred format, and one in another.

    Of the two other formats, the untrained model finds one likelier than the preferred format, and
    one less likely.
    """
    rng = random.Random(seed)
    examples = []
    for row in range(rows):
        event = rng.choice(extraction.EVENTS)
        name = rng.choice(names)
        day = rng.choice(extraction.DAYS)
        hour = rng.randint(1, 11)
        if row % 2 == 0:
            rejected = f" {event} with {name}: {day}, {hour} pm"
        else:
            rejected = f" {name}, {day}, {hour} pm: {event}"
        examples.append(
            {
                "prompt": f"Note: {event} with {name} on {day} at {hour} pm\nReminder:",
                "chosen": f" {day}, {hour} pm: {event} with {name}",
                "rejected": rejected,
            }
        )
    return Dataset.from_list(examples)


def accuracy(trainer: transformers.Trainer, test: Dataset, prediction: str) -> float:
    """Return the share of pairs whose chosen answer is likelier, or has the higher score."""
    predictions = trainer.predict(test).predictions
    values = predictions[prediction] if isinstance(predictions, dict) else predictions
    return float((values[:, 0] > values[:, 1]).mean())


def main(method_name: str) -> None:
    """Measure the model, train it, measure it again, and report."""
    method = METHODS[method_name]
    output = ROOT / "quickstart" / f"preferences-{method_name}"
    shutil.rmtree(output, ignore_errors=True)
    models.smollm2(MODEL)
    test = pairs(32, extraction.HELD_OUT, seed=1)
    start_time = time.perf_counter()
    start_processor_time = time.process_time()
    args = method.config_class(
        str(output / "run"),
        max_steps=16,
        per_device_train_batch_size=method.batch_size,
        learning_rate=method.learning_rate,
        warmup_steps=3,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    train = pairs(64, extraction.NAMES, seed=0)
    trainer = method.trainer_class(str(MODEL), args=args, train_dataset=train)
    accuracy_before = accuracy(trainer, test, method.prediction)
    trainer.train()
    summary = {
        "held_out_accuracy_before": accuracy_before,
        "held_out_accuracy_after": accuracy(trainer, test, method.prediction),
        "seconds": round(time.perf_counter() - start_time, 1),
        "processor_seconds": round(time.process_time() - start_processor_time, 1),
    }
    report.write_summary(summary, output / "summary.json")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trainer", choices=METHODS, default="dpo")
    main(parser.parse_args().trainer)
