"""Pipelines whose stages differ in layers, replicas and tensor size: planned here, but not run by the executor."""
