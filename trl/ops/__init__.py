"""The mathematics of the trainers: functions of tensors that depend on torch alone."""
