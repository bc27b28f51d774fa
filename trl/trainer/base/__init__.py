"""What every trainer has: options, checkpoints, resuming, the policy."""
