"""The costs of a train step, computed from a config and its network's description: weights, flops, memory, work."""
