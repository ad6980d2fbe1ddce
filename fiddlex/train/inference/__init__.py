"""What trained weights are used for: evaluation, predictions, and samples of text."""
