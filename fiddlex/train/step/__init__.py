"""The compiled train step: its state, where its gradients come from, and the update."""
