"""Seconds of everything that a train step does, on a topology: what the simulator is run with.

Times of computation are reckoned from the work (`work`) and a chip's peak, or come from a profile of measured ones
(`profile`). Communication is counted on the links that it really crosses (`Topology.rings`): tensor parallelism inside a
layer, hops between stages, the whole pipe for embedding and head, gradients and weights over `data`. Communication
inside a layer, and that over `data`, is taken to be exposed, as XLA schedules it beside nothing. Imports no jax.

Sources: volumes of Narayanan et al., SC 2021, section 3; sequence parallelism of Korthikanti et al., MLSys 2023,
section 3.2 (an all-reduce is a reduce-scatter and an all-gather of the same bytes).
"""

import dataclasses
from collections.abc import Sequence

from fiddlex.config import Config
from fiddlex.pipeline.placement import LayerPlacement
from fiddlex.planner.communication import all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from fiddlex.planner.work import BYTES, FLOAT32, EdgeWork, LayerWork, edge_work, layer_work
from fiddlex.simulate.clock import Costs
from fiddlex.topology import Ring, Topology

# Moments that an optimizer reads and writes for every weight; Adafactor's are vectors.
_MOMENTS = {"adamw": 2, "adam": 2, "lamb": 2, "sgd": 1, "adafactor": 0}


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds on one device.

    Attributes:
      forward: of a layer and microbatch.
      backward_input: likewise, with what is computed again for it.
      backward_weight: likewise.
      exchange: of those three, what is communication over `tensor`.
      embed: of a microbatch, on all ranks together.
      head: likewise.
      embed_backward: likewise.
      hops: from each rank of the pipe to the next, the last to the first.
      reduce: of the gradients over `data`, once a step.
      gather: of the weights over `data`, once a step.
      update: of the optimizer, once a step.
    """

    forward: float
    backward_input: float
    backward_weight: float
    exchange: float
    embed: float
    head: float
    embed_backward: float
    hops: tuple[float, ...]
    reduce: float
    gather: float
    update: float

    @property
    def per_step(self) -> float:
        """Seconds of a step outside the pipeline."""
        return self.reduce + self.gather + self.update

    @property
    def layer(self) -> float:
        """Seconds of a layer and microbatch, forward and backward."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def edges(self) -> float:
        """Seconds of a microbatch outside the layers."""
        return self.embed + self.head + self.embed_backward

    def costs(self, placement: LayerPlacement) -> Costs:
        """What the simulator's clocks take, for layers on stages."""
        layers, ranks = placement.layers_per_stage, placement.stage_ranks
        forward, inputs, weights = (
            tuple(each * time for each in layers)
            for time in (self.forward, self.backward_input, self.backward_weight)
        )
        return Costs(forward, inputs, weights, self._hops(ranks), self.embed, self.head, self.embed_backward)

    def _hops(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Of each stage the slower of its messages, to the stage before and to the one behind."""
        between = [self._hop(first, second) for first, second in zip(ranks, ranks[1:], strict=False)]
        return tuple(max(pair) for pair in zip([0.0, *between], [*between, 0.0], strict=True))

    def _hop(self, first: int, second: int) -> float:
        """Between two ranks, the shorter way round."""
        if first == second:
            return 0.0
        low, high = sorted((first, second))
        around = high - low > 1 and low == 0 and high == len(self.hops) - 1
        return self.hops[high] if around else max(self.hops[low:high])


@dataclasses.dataclass(frozen=True)
class System:
    """How a training system does what systems do differently; the defaults are this project's.

    Attributes:
      vocabulary_over_pipe: the vocabulary is spread over `pipe` too, and all ranks score together.
      scatters_hops: each tensor rank sends its part of an activation, which is gathered where it arrives (Narayanan et
        al., SC 2021, section 4.1).
      gradient_bytes: of a weight's gradient as it is reduced over `data`; None: 4.
      flash: attention runs in a fused kernel.
    """

    vocabulary_over_pipe: bool = True
    scatters_hops: bool = False
    gradient_bytes: int = FLOAT32
    flash: bool = False


def step_times(
    config: Config, topology: Topology, *, efficiency: float, num_parameters: float, system: System | None = None
) -> StepTimes:
    """Reckons the times of a step.

    Args:
      config: validated.
      topology: what it runs on.
      efficiency: share of the chip's peak that large products reach.
      num_parameters: weights that the fullest device holds.
      system: how it runs.

    Raises:
      ConfigError: when the topology does not join the mesh's devices, or has no peak for the dtype.
    """
    system = system or System()
    mesh, itemsize = config.mesh, BYTES[config.model.dtype]
    net = _Net.of(config, topology, system)
    shards = mesh.tensor * (mesh.pipe if system.vocabulary_over_pipe else 1)
    layer, edges = layer_work(config, flash=system.flash), edge_work(config, shards=shards)

    def seconds(work: LayerWork | EdgeWork, *names: str) -> float:
        return sum(getattr(work, name).seconds(topology.chip, config.model.dtype, efficiency) for name in names)

    repeats = config.pipeline.recompute == "full"
    exchange = net.layer
    return StepTimes(
        forward=seconds(layer, "forward") + exchange,
        backward_input=seconds(layer, "again", "backward_input") + exchange * (1 + repeats),
        backward_weight=seconds(layer, "backward_weight"),
        exchange=exchange * (2 + repeats),
        embed=seconds(edges, "embed") + net.pipe + net.tensor,
        head=seconds(edges, "head") + 2 * net.pipe + net.tensor,
        embed_backward=seconds(edges, "embed_backward") + net.pipe,
        hops=net.hops,
        reduce=_reduce(config, num_parameters * system.gradient_bytes, net.data),
        gather=all_gather_s(num_parameters * itemsize, net.data) if config.optimizer.zero1 else 0.0,
        update=_update_bytes(config, num_parameters) / topology.chip.memory_bandwidth,
    )


@dataclasses.dataclass(frozen=True)
class _Net:
    """Seconds of communication for a microbatch, and the links over which replicas exchange.

    Attributes:
      layer: two reductions over `tensor`, as a layer's forward and its backward each have.
      tensor: one reduction over `tensor`.
      pipe: one reduction of the residual stream over `pipe`.
      hops: see `StepTimes`.
      data: rings of the replicas.
    """

    layer: float
    tensor: float
    pipe: float
    hops: tuple[float, ...]
    data: tuple[Ring, ...]

    @classmethod
    def of(cls, config: Config, topology: Topology, system: System) -> "_Net":
        mesh = config.mesh
        rows = config.data.num_choices if config.model.task == "multiple_choice" else 1
        tokens = config.microbatch_size * rows * config.model.seq_len
        whole = tokens * config.model.hidden_size * BYTES[config.model.dtype]
        part = whole / mesh.tensor if mesh.sequence_parallel else whole
        tensor = all_reduce_s(whole, topology.rings(1, mesh.tensor))
        over_pipe = system.vocabulary_over_pipe and mesh.pipe > 1
        return cls(
            layer=2 * tensor,
            tensor=tensor,
            pipe=all_reduce_s(part, topology.rings(mesh.tensor, mesh.pipe)) if over_pipe else 0.0,
            hops=_hops(config, topology, part, whole if system.scatters_hops else 0),
            data=topology.rings(mesh.tensor * mesh.pipe, mesh.data),
        )


def _hops(config: Config, topology: Topology, part: float, scattered: float) -> tuple[float, ...]:
    """From each rank to the next, on the slowest link of all replicas that are placed differently."""
    mesh = config.mesh
    if mesh.pipe == 1:
        return (0.0,)
    stride, times = mesh.tensor * mesh.pipe, []
    for rank in range(mesh.pipe):
        ends = (rank * mesh.tensor, (rank + 1) % mesh.pipe * mesh.tensor)
        links = [
            topology.link_between(*(end + replica * stride for end in ends)) for replica in range(min(mesh.data, 8))
        ]
        slowest = min(links, key=lambda link: link.bandwidth)
        if scattered:
            gathered = all_gather_s(scattered, topology.rings(1, mesh.tensor))
            times.append(send_s(scattered / mesh.tensor, slowest) + gathered)
        else:
            times.append(send_s(part, slowest))
    return tuple(times)


def _reduce(config: Config, num_bytes: float, rings: tuple[Ring, ...]) -> float:
    return (reduce_scatter_s if config.optimizer.zero1 else all_reduce_s)(num_bytes, rings)


def _update_bytes(config: Config, num_parameters: float) -> float:
    """What the optimizer reads (gradient, weight, moments) and writes (weight, moments), all float32, and the norm."""
    mine = num_parameters / (config.mesh.data if config.optimizer.zero1 else 1)
    return mine * FLOAT32 * (4 + 2 * _MOMENTS[config.optimizer.name])
