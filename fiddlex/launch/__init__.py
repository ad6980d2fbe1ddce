"""Starts the processes of a run: job files for Slurm, Kubernetes, Open MPI and ssh, and the supervisor of processes.

Invariant: nothing here imports jax, so a machine without accelerators and without jax writes job files.
"""
