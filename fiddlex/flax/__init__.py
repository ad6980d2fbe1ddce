"""Flax modules of your own, NNX or Linen, as a family of models (docs/flax.md)."""

from fiddlex.flax.family import family

__all__ = ["family"]
