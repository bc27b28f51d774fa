"""The mathematics of the trainers: pure functions of tensors that need torch alone."""
