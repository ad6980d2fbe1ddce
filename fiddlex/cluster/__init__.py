"""What a run runs on: chips and the links between them as data, and the mesh of devices that jax has."""
