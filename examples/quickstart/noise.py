"""The control: a reward that has nothing to do with what was written."""

import random


def random_reward(completions: list[str], **kwargs) -> list[float]:
    """0 or 1 by chance; a policy trained on it must not get better."""
    return [float(random.random() < 0.5) for _ in completions]
