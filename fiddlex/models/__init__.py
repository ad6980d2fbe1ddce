"""Models: what each family's network is (`spec`, `task_sizes`, `families`), and what computes it on a mesh."""
