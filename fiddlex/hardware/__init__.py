"""Hardware as data: chips, the links between them, hosts and prices, without jax."""
