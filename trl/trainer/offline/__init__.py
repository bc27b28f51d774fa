"""What trainers that learn from the examples of a dataset share."""
