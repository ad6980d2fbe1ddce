"""Training: state, step, optimizer, checkpoints, metrics, and the `Trainer` that puts them together."""
