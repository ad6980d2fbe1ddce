"""Programs compiled by XLA: train steps compiled ahead of time, and analysis of the printed program."""
