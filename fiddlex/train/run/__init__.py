"""What a run keeps on disk: its directory, checkpoints, metrics, and weights for other runs."""
