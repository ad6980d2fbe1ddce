"""Weights to and from other programs: the folders of Hugging Face's transformers."""
