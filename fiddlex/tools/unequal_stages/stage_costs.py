"""Seconds and bytes of stages apart from what the choices of their layers determine, by the formulas of `piper`."""

import functools

import numpy as np

from fiddlex.tools.unequal_stages.chain import StageProblem


class StageCosts:
    """The costs of all stages of a problem, of layers i to j in [i, j]; entries with j < i mean nothing."""

    def __init__(self, problem: StageProblem):
        self._problem = problem
        self.extra_s = functools.cache(self._extra_s)
        self.fixed_bytes = functools.cache(self._fixed_bytes)

    def _extra_s(self, replicas: int, tensor: int) -> np.ndarray:
        """Seconds between two microbatches of what comes on top of passes: activations, and the sum of gradients."""
        layers, bandwidth = self._problem.chains[tensor].layers, self._problem.bandwidth
        sent = np.array([0.0, *(layer.output_bytes for layer in layers[:-1]), 0.0])
        summed = _sums(np.array([layer.weight_bytes for layer in layers]))
        share = 4 * (replicas - 1) / replicas / self._problem.num_microbatches
        return (2 * (sent[:-1, None] + sent[None, 1:]) / replicas + share * summed) / bandwidth

    def _fixed_bytes(self, replicas: int, tensor: int) -> np.ndarray:
        """Bytes on each device without the stash."""
        chain = self._problem.chains[tensor]
        own = np.array([layer.kept_bytes + layer.divided_bytes / replicas for layer in chain.layers])
        return chain.working_bytes + _sums(own)


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums of values i to j, [i, j]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, 1:] - total[:-1, None]
