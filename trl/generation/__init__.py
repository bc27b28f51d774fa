"""Engines that complete prompts. Nothing here knows an algorithm."""
