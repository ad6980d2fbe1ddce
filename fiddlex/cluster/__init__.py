"""The hardware of a run: chips and the links between them as data, and the mesh of jax's devices."""
