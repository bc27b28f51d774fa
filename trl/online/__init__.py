"""Stages of a training step. Nothing here knows an engine or an algorithm."""
