"""Train from the command line, with the task's reward and with a random one, and compare.

python examples/quickstart/run.py                 # SmolLM2-135M-Instruct, addition, RLOO
python examples/quickstart/run.py --trainer ppo   # the same by PPO; or grpo, online-dpo
python examples/quickstart/run.py --tiny          # a model from scratch, copying digits, RLOO
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.quickstart import addition, copying, evaluate, models, report

ROOT = Path(__file__).resolve().parents[2]
TASKS = {
    "addition": (addition, addition.exact_sum, models.smollm2, "smollm2-135m-instruct", 3),
    "copying": (copying, copying.right_digits, models.from_scratch, "tiny", copying.LENGTH),
}


def train(trainer: str, name: str, folder: Path, reward: str) -> None:
    """Run the command line with the task's configuration."""
    command = [
        *(sys.executable, "-m", "trl", trainer),
        *("--config", f"examples/cli_configs/{trainer}_{name}.yaml"),
        *("--reward_funcs", reward, "--output_dir", str(folder)),
    ]
    print("$ python", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def main(name: str, trainer: str) -> None:
    """Prepare, measure, train twice, measure again, report."""
    task, reward, make_model, model_name, tokens = TASKS[name]
    folder = name if trainer == "rloo" else f"{name}-{trainer}"
    output, model = ROOT / "quickstart" / folder, ROOT / "quickstart" / model_name
    shutil.rmtree(output, ignore_errors=True)
    make_model(model)
    task.write(output / "data")
    started = time.perf_counter()
    test = output / "data" / "test.jsonl"
    before = evaluate.accuracies(model, test, reward, tokens)
    runs = {"task reward": output / "run", "random reward": output / "control"}
    train(trainer, name, runs["task reward"], f"examples.quickstart.{name}.{reward.__name__}")
    train(trainer, name, runs["random reward"], "examples.quickstart.noise.random_reward")
    after = evaluate.accuracies(runs["task reward"], test, reward, tokens)
    control = evaluate.accuracies(runs["random reward"], test, reward, tokens)
    summary = {}
    for name, found in (("", after), ("control_", control)):
        for way in ("sampled", "greedy"):
            summary |= {f"{name}{way}_before": before[way], f"{name}{way}_after": found[way]}
    summary["seconds"] = round(time.perf_counter() - started, 1)
    report.draw_curve(runs, output / "reward_curve.png")
    shutil.copy(runs["task reward"] / "completions" / "train.jsonl", output / "completions.jsonl")
    report.write_summary(summary, output / "summary.json")
    report.show_table(summary, task.NOTE)
    print(
        f"Written to {output.relative_to(ROOT)}: reward_curve.png, completions.jsonl, summary.json"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="the model from scratch, by RLOO")
    parser.add_argument("--trainer", choices=("rloo", "grpo", "online-dpo", "ppo"), default="rloo")
    chosen = parser.parse_args()
    main("copying", "rloo") if chosen.tiny else main("addition", chosen.trainer)
