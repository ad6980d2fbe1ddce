"""Checkpoints: written in the background, verified when read, resumable on another layout."""
