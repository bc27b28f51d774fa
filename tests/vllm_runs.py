"""What runs with a vLLM engine wrote, and the reward that they learn by."""

import json


def completions(folder, mode="train"):
    lines = (folder / "completions" / f"{mode}.jsonl").read_text().splitlines()
    return [json.loads(line)["completion_ids"] for line in lines]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def share_of_digits(completions, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
