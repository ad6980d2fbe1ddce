"""A run's files on disk: its directory, checkpoints, metrics, and weights for other runs."""
