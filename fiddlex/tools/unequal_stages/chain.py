"""The problem that Piper's partitioner solves: a chain of layers, for each tensor size, and a cluster.

Tarnawski, Narayanan and Phanishayee, Piper (NeurIPS 2021), section 3. A layer has several choices of what its backward
pass recomputes, with more seconds and a smaller stash (in the paper a choice is a TMPC). A stage is a run of layers on
d replicas of t devices each.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fiddlex.errors import ConfigError


class Choice(NamedTuple):
    """One way to run a layer on one of its tensor ranks."""

    # seconds of a microbatch's forward and backward pass, with what it recomputes and exchanges in the layer
    seconds: float
    stash_bytes: float  # bytes that the layer keeps of each microbatch between the two passes
    # what the backward pass recomputes, as in `PipelineConfig.recompute`; empty: there is nothing to choose
    recompute: str = ""


class ShardedLayer(NamedTuple):
    """A layer on a number of tensor ranks; all bytes are those of one rank."""

    choices: tuple[Choice, ...]  # the ways to run the layer, at least one
    output_bytes: float  # bytes that go to the next stage for a microbatch, where the next layer is in that stage
    weight_bytes: float  # bytes of the gradients that replicas sum
    kept_bytes: float  # bytes of weights, gradients and the like that each replica keeps
    # bytes that the replicas of a stage divide among each other, as ZeRO-1 does with optimizer state
    divided_bytes: float = 0.0


class Chain(NamedTuple):
    """A model's layers in order on a number of tensor ranks."""

    layers: tuple[ShardedLayer, ...]
    # bytes that the passes through a layer hold while they run, on each device, whatever its layers
    working_bytes: float = 0.0


class Part(NamedTuple):
    """Layers `first` to `last` on `replicas` replicas of `tensor` devices each."""

    first: int
    last: int
    replicas: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class StageProblem:
    """A model and a cluster."""

    chains: Mapping[int, Chain]  # the model's layers for each tensor size that a stage may have; all have equally many
    num_devices: int  # a pipeline may leave some unused
    memory_bytes: float  # bytes that a stage may take on each device
    bandwidth: float  # bytes/s of each device to devices outside its stage's tensor ranks
    num_microbatches: int  # microbatches of a batch, over which the sum of gradients is spread

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.chains.values())).layers)

    def validate(self) -> "StageProblem":
        """Checks every figure; returns the problem itself, so that calls can be chained."""
        lengths = {size: len(chain.layers) for size, chain in self.chains.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ConfigError(f"numbers of layers by tensor size are {lengths}: there must be one number, at least 1.")
        if not 1 <= min(self.chains) <= self.num_devices:
            raise ConfigError(
                f"{self.num_devices} devices for tensor sizes {', '.join(map(str, sorted(self.chains)))}: there must "
                "be at least as many devices as the smallest size, which is at least 1."
            )
        if self.num_microbatches < 1:
            raise ConfigError(f"{self.num_microbatches} microbatches in a batch: there must be at least 1.")
        if not 0 < self.bandwidth < math.inf or not 0 < self.memory_bytes < math.inf:
            raise ConfigError(
                f"bandwidth {self.bandwidth} bytes/s, memory {self.memory_bytes} bytes: both must be greater than 0 "
                "and finite."
            )
        for size, chain in self.chains.items():
            _check(f"working_bytes at tensor size {size}", [chain.working_bytes])
            for number, layer in enumerate(chain.layers):
                name = f"layer {number} at tensor size {size}"
                if not layer.choices:
                    raise ConfigError(f"{name} has no choice of how to run it: give at least one.")
                _check(name, layer[1:])
                for choice in layer.choices:
                    _check(f"{name} with recompute={choice.recompute}", choice[:2])
        return self

    def replica_counts(self) -> list[int]:
        """The numbers of replicas that a stage may have: they divide the microbatches of a batch (Piper, section 3)."""
        most = min(self.num_devices, self.num_microbatches)
        return [number for number in range(1, most + 1) if self.num_microbatches % number == 0]


def _check(name: str, figures: Iterable[float]) -> None:
    figures = list(figures)
    if not all(0 <= figure < math.inf for figure in figures):
        raise ConfigError(f"{name}: {', '.join(map(str, figures))} must be at least 0 and finite.")
