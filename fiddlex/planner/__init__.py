"""Chooses the layout of a run for given hardware. Imports no jax."""
