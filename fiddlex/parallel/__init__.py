"""What parallel layers share: the sharding table, the collectives of tensor parallelism, ZeRO-1."""
