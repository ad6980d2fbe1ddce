"""Uses of trained weights: evaluation, predictions, and sampling of text."""
