"""A control: a reward that does not depend on the completion."""

import random


def random_reward(completions: list[str], **kwargs) -> list[float]:
    """Reward 0 or 1 at random. A policy trained on this must not improve."""
    return [float(random.random() < 0.5) for _ in completions]
