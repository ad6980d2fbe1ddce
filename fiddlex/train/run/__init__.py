"""What a run keeps and tells beside its steps: workdir, checkpoints, records, faults, and weights for other runs."""
