"""The compiled train step: its state, the sources of its gradients, and the update."""
