"""The results of a quickstart run: reward curve, table and summary."""

import json
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table


def mean_rewards(folder: Path) -> dict[int, float]:
    """Return the mean reward of each optimizer step, from the completions that a run wrote."""
    rewards = defaultdict(list)
    with (folder / "completions" / "train.jsonl").open() as file:
        for line in file:
            record = json.loads(line)
            rewards[record["step"] + 1].append(record["reward"])
    return {step: sum(values) / len(values) for step, values in sorted(rewards.items())}


def draw_curve(runs: dict[str, Path], path: Path) -> None:
    """Plot the mean reward of runs over optimizer steps, and save the plot as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, folder in runs.items():
        rewards = mean_rewards(folder)
        axes.plot(rewards.keys(), rewards.values(), marker=".", label=name)
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show_table(summary: dict[str, float], note: str) -> None:
    """Print the accuracy on held-out prompts before and after training, and a note on it."""
    table = Table(title="Share of held-out prompts answered correctly")
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right")
    keys = {
        "sampled": "sampled",
        "greedy": "greedy",
        "control: random reward, sampled": "control_sampled",
        "control: random reward, greedy": "control_greedy",
    }
    for label, key in keys.items():
        table.add_row(label, f"{summary[f'{key}_before']:.3f}", f"{summary[f'{key}_after']:.3f}")
    Console().print(table)
    Console().print(note, soft_wrap=True)


def write_summary(summary: dict[str, float], path: Path) -> None:
    """Write the figures as JSON."""
    path.write_text(json.dumps(summary, indent=2) + "\n")
