"""Datasets of tokens from files of text: what `experiments/prepare_data.py` does."""
