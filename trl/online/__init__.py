"""Stages of online training: prompts, rewards, metrics. No engine or algorithm is imported."""
