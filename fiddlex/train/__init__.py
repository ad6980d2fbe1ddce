"""Training: the `Trainer` and the training loop; the compiled step, the run's directory, and inference."""
