"""What a train step costs, told from a config and the description of its network: weights, flops, memory, work."""
