"""Training: the `Trainer` and the loop of a run, over the compiled step, the run's directory, and inference."""
