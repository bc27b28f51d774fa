"""Datasets: their formats, their rows as token ids, and what goes into a micro-batch."""
