"""The training loop and what keeps it safe: guards, checkpoints, signals, tracking."""
