"""Weights that pass between runs, and to and from folders of transformers."""
