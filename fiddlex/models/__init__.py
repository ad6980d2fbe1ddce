"""Models: the description of each family's network (`spec`, `task_sizes`, `descriptions`), and code to compute it."""
