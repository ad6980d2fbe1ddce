"""From a model and a cluster to a layout: what a step takes, what fits, and which of all layouts is best."""
