"""What the quickstart shows and leaves behind: reward curve, table, summary."""

import json
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table


def mean_rewards(folder: Path) -> dict[int, float]:
    """Mean reward of each optimizer step, from the completions a run wrote."""
    steps = defaultdict(list)
    with (folder / "completions" / "train.jsonl").open() as file:
        for line in file:
            record = json.loads(line)
            steps[record["step"] + 1].append(record["reward"])
    return {step: sum(values) / len(values) for step, values in sorted(steps.items())}


def draw_curve(runs: dict[str, Path], path: Path) -> None:
    """Draw the reward of several runs over optimizer steps as a PNG."""
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
    """Print accuracy on held-out prompts, before and after, and how to read it."""
    table = Table(title="Held-out prompts, share answered rightly")
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right")
    for label, key in {
        "sampled": "sampled",
        "greedy": "greedy",
        "control: random reward, sampled": "control_sampled",
        "control: random reward, greedy": "control_greedy",
    }.items():
        table.add_row(label, f"{summary[f'{key}_before']:.3f}", f"{summary[f'{key}_after']:.3f}")
    Console().print(table)
    Console().print(note, soft_wrap=True)


def write_summary(summary: dict[str, float], path: Path) -> None:
    """Write the figures as JSON."""
    path.write_text(json.dumps(summary, indent=2) + "\n")
