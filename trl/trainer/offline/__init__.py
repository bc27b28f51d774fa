"""The skeleton of trainers that learn from the examples of a dataset."""
