"""Train with a task's reward and with a random reward from the command line, and compare them.

python examples/quickstart/run.py                 # SmolLM2-135M-Instruct, addition, RLOO
python examples/quickstart/run.py --trainer ppo   # the same with PPO; also grpo, online-dpo
python examples/quickstart/run.py --tiny          # a model from scratch, copying digits, RLOO
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.quickstart import addition, copying, evaluate, models, report

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Task:
    """What a run of the quickstart trains on, and which model."""

    module: ModuleType  # has `write`, which writes the data files, and a `NOTE` on the results
    reward: evaluate.Reward
    make_model: Callable[[Path], None]
    model_name: str
    answer_tokens: int


TASKS = {
    "addition": Task(
        module=addition,
        reward=addition.exact_sum,
        make_model=models.smollm2,
        model_name="smollm2-135m-instruct",
        answer_tokens=3,
    ),
    "copying": Task(
        module=copying,
        reward=copying.right_digits,
        make_model=models.from_scratch,
        model_name="tiny",
        answer_tokens=copying.LENGTH,
    ),
}


def train(trainer: str, task_name: str, folder: Path, reward: str) -> None:
    """Run the training command with the task's configuration."""
    command = [sys.executable, "-m", "trl", trainer]
    command += ["--config", f"examples/cli_configs/{trainer}_{task_name}.yaml"]
    command += ["--reward_funcs", reward]
    command += ["--output_dir", str(folder)]
    print("$ python", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def main(task_name: str, trainer: str) -> None:
    """Measure the model, train it with both rewards, measure the results, and report them."""
    task = TASKS[task_name]
    folder = task_name if trainer == "rloo" else f"{task_name}-{trainer}"
    output = ROOT / "quickstart" / folder
    model = ROOT / "quickstart" / task.model_name
    shutil.rmtree(output, ignore_errors=True)
    task.make_model(model)
    task.module.write(output / "data")
    start_time = time.perf_counter()

    def accuracies(model_folder: Path) -> dict[str, float]:
        test_file = output / "data" / "test.jsonl"
        return evaluate.accuracies(model_folder, test_file, task.reward, task.answer_tokens)

    before = accuracies(model)
    task_run = output / "run"
    control_run = output / "control"
    reward_path = f"{task.module.__name__}.{task.reward.__name__}"
    train(trainer, task_name, task_run, reward_path)
    train(trainer, task_name, control_run, "examples.quickstart.noise.random_reward")
    summary: dict[str, float] = {}
    for prefix, run_folder in (("", task_run), ("control_", control_run)):
        after = accuracies(run_folder)
        for decoding in ("sampled", "greedy"):
            summary[f"{prefix}{decoding}_before"] = before[decoding]
            summary[f"{prefix}{decoding}_after"] = after[decoding]
    summary["seconds"] = round(time.perf_counter() - start_time, 1)
    curves = {"task reward": task_run, "random reward": control_run}
    report.draw_curve(curves, output / "reward_curve.png")
    shutil.copy(task_run / "completions" / "train.jsonl", output / "completions.jsonl")
    report.write_summary(summary, output / "summary.json")
    report.show_table(summary, task.module.NOTE)
    print(
        f"Written to {output.relative_to(ROOT)}: reward_curve.png, completions.jsonl, summary.json"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="the model with random weights and RLOO"
    )
    parser.add_argument("--trainer", choices=("rloo", "grpo", "online-dpo", "ppo"), default="rloo")
    options = parser.parse_args()
    if options.tiny:
        main("copying", "rloo")
    else:
        main("addition", options.trainer)
