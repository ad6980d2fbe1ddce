"""For a model on a cluster: predicts the step time and memory of each layout, and finds the best layout."""
