"""Appointments in plain words, to be written as JSON: texts, and how to judge answers."""

import json
import random
from pathlib import Path

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
EVENTS = ("lunch", "dinner", "a call", "coffee", "a meeting", "tennis", "a walk", "a lesson")
NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack"),
    *("Karen", "Leo", "Maria", "Noah", "Olga", "Paul"),
)
HELD_OUT = ("Quentin", "Rosa", "Simon", "Teresa", "Victor", "Wendy")
NOTES = (
    "{event} with {name} on {day} at {hour} {half}",
    "On {day} {name} and I have {event}, {hour} {half}.",
    "{name} asked for {event}: {day}, {hour} {half}",
    "Don't forget {event} at {hour} {half} on {day}, {name} will be there",
)


def row(draw: random.Random, names: tuple[str, ...]) -> dict[str, str]:
    """A note as the prompt, and its JSON as the completion."""
    event, name, day = draw.choice(EVENTS), draw.choice(names), draw.choice(DAYS)
    hour, half = draw.randint(1, 11), draw.choice(("am", "pm"))
    note = draw.choice(NOTES).format(event=event, name=name, day=day, hour=hour, half=half)
    found = {"what": event.removeprefix("a "), "who": name, "day": day[:3].lower()}
    found["time"] = f"{hour + 12 * (half == 'pm'):02}:00"
    return {"prompt": f"Note: {note}\nJSON:", "completion": f" {json.dumps(found)}"}


def write(folder: Path, rows: int = 320, tests: int = 32) -> None:
    """Write `train.jsonl`, and `test.jsonl` with people who are not in it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for name, count, people in (("train", rows, NAMES), ("test", tests, HELD_OUT)):
        lines: dict[str, None] = {}
        while len(lines) < count:  # none twice
            lines[json.dumps(row(draw, people))] = None
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def right_json(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """1 if the first line of the completion is JSON that says the same as the answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(_read(text.strip().split("\n")[0]) == json.loads(right)) for text, right in pairs]


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
