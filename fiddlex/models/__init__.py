"""Models: the description of each family's network (`spec`, `task_sizes`, `families`), and code to compute it."""
