"""Notes about appointments that the model should write as JSON: data files and reward."""

import json
import random
from pathlib import Path

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
EVENTS = ("lunch", "dinner", "a call", "coffee", "a meeting", "tennis", "a walk", "a lesson")
NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Karen",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
)
HELD_OUT = ("Quentin", "Rosa", "Simon", "Teresa", "Victor", "Wendy")
NOTES = (
    "{event} with {name} on {day} at {hour} {half}",
    "On {day} {name} and I have {event}, {hour} {half}.",
    "{name} asked for {event}: {day}, {hour} {half}",
    "Don't forget {event} at {hour} {half} on {day}, {name} will be there",
)


def row(rng: random.Random, names: tuple[str, ...]) -> dict[str, str]:
    """Make a row with a note as the prompt, and its JSON as the completion."""
    event = rng.choice(EVENTS)
    name = rng.choice(names)
    day = rng.choice(DAYS)
    hour = rng.randint(1, 11)
    half = rng.choice(("am", "pm"))
    note = rng.choice(NOTES).format(event=event, name=name, day=day, hour=hour, half=half)
    hour_of_day = hour + 12 if half == "pm" else hour
    appointment = {
        "what": event.removeprefix("a "),
        "who": name,
        "day": day[:3].lower(),
        "time": f"{hour_of_day:02}:00",
    }
    return {"prompt": f"Note: {note}\nJSON:", "completion": f" {json.dumps(appointment)}"}


def write(folder: Path, rows: int = 320, tests: int = 32) -> None:
    """Write `train.jsonl`, and `test.jsonl` with names that do not occur in it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, count, people in (("train", rows, NAMES), ("test", tests, HELD_OUT)):
        lines: dict[str, None] = {}  # a dictionary, so that no row occurs twice
        while len(lines) < count:
            lines[json.dumps(row(rng, people))] = None
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def right_json(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward 1 if the first line of a completion is JSON equal to the answer, else 0."""
    rewards = []
    for text, expected in zip(completions, answer, strict=True):
        first_line = text.strip().split("\n")[0]
        rewards.append(float(_parse(first_line) == json.loads(expected)))
    return rewards


def _parse(text: str) -> object:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return None
