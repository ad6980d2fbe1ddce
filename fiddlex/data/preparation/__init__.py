"""Datasets of tokens from files of text: what `fiddlex prepare_data` does."""
