"""Models: what each family's network is (`spec`, `tasks`, `families`, without jax), and what computes it on a mesh."""
