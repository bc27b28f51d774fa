"""The skeleton of trainers that generate their own completions."""
