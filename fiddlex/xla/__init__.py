"""Programs that XLA has compiled: train steps compiled ahead of time, and what the printed program says."""
