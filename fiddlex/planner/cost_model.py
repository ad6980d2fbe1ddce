"""Computes the seconds of every part of a train step on a topology, as costs for the simulator.

The model computes compute times from the work (`fiddlex.costs.work`) and the chip's peak. It counts communication on
the links that the messages cross (`Topology.rings`): tensor parallelism inside a layer, hops between stages, the whole
pipe for embedding and head, gradients and weights over `data`. Communication inside a layer, except where products run
in pieces (`fiddlex.planner.layer_exchange`), and over `data` is exposed, because XLA overlaps it with nothing.

Sources: volumes of Narayanan et al., SC 2021, section 3; sequence parallelism of Korthikanti et al., MLSys 2023,
section 3.2 (an all-reduce is a reduce-scatter and an all-gather of the same bytes).
"""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.config.sections import AXES
from fiddlex.config.values.recompute import FULL, recomputed
from fiddlex.costs.backend import backend_of
from fiddlex.costs.layer_memory import LayerMemory
from fiddlex.costs.weight_memory import num_moments
from fiddlex.costs.work import Work, edge_work, exchanged_work, layer_work, update_work
from fiddlex.hardware.links import Link
from fiddlex.hardware.pieces import num_blocks, num_ways, runs_in_blocks
from fiddlex.hardware.topology import Topology
from fiddlex.models.device_arrays import FLOAT32, ITEMSIZES, num_sequences
from fiddlex.models.registry import network_of
from fiddlex.models.spec import Network
from fiddlex.planner.communication import (
    Share,
    all_gather_s,
    all_gather_shares,
    all_reduce_s,
    hop_s,
    reduce_scatter_s,
    ring_shares,
    send_s,
)
from fiddlex.planner.host_link import layer_bytes, update_bytes
from fiddlex.planner.layer_exchange import LayerExchange, ProductTimes, exchange_of_blocks, exchange_of_rings
from fiddlex.planner.links import MeshLinks
from fiddlex.planner.times import MicrobatchTimes, StepTimes
from fiddlex.schedules.placement import LayerPlacement

# Share of the peak that large products reach: fitted to the first four rows of SC'21's table 1 (docs/planner.md).
EFFICIENCY = 0.636


@dataclasses.dataclass(frozen=True)
class System:
    """Choices in which training systems differ; the defaults are those of this project."""

    vocabulary_over_pipe: bool = True  # the vocabulary is sharded over `pipe` too, so that all ranks compute the loss
    # each tensor rank sends its part of an activation; receivers gather (Narayanan et al., SC 2021, section 4.1)
    scatters_hops: bool = False
    gradient_bytes: int = FLOAT32  # of a weight's gradient when it is reduced over `data`
    # whether attention runs in a fused kernel; None: if the chip has a kernel that runs the model
    flash: bool | None = None


class Traffic(NamedTuple):
    """What a mesh axis sends over one link in a step."""

    axis: str  # `data`, `pipe` or `tensor`
    link: Link
    bytes: float  # that a device sends, on the device that sends most
    seconds: float  # that these bytes take, also where work hides them


class _Exchanged(NamedTuple):
    """The products beside which a layer's exchanges run under collective matmul."""

    times: tuple[ProductTimes, ...]
    pieces: int  # number of blocks, or of directions in which parts travel around rings


class CostModel:
    """The times of a step of one model on one kind of cluster, for any layout; caches what layouts have in common.

    Args:
      config: the model ignores its mesh and, of its pipeline, all but prediction, stash and where weights wait.
      efficiency: share of the chip's peak that large products reach.
      system: the choices of the training system; None: those of this project.

    Raises:
      ConfigError: when the topology has no peak for the dtype; with `optimizer.offload` or
        `pipeline.stash_memory=host`, when it has no [host].
    """

    def __init__(
        self, config: Config, topology: Topology, *, efficiency: float = EFFICIENCY, system: System | None = None
    ):
        self._config, self._topology, self._efficiency = config, topology, efficiency
        self._system, self._itemsize = system or System(), ITEMSIZES[config.model.dtype]
        self._backend = backend = backend_of(topology.compiler)
        has_flash, self._in_blocks = bool(backend.flash_kernel(config).name), runs_in_blocks(backend.platform)
        self._flash = has_flash if self._system.flash is None else self._system.flash
        topology.chip.peak(config.model.dtype)
        uses_host = config.optimizer.offload or config.pipeline.spills
        self._host_bandwidth = topology.host_memory.bandwidth if uses_host else math.inf
        # Each cost model has its own caches, which are freed with it.
        self._layer_once, self._edges_once = functools.cache(self._layer), functools.cache(self._edges)
        self._links_once, self._exchanged_once = functools.cache(self._links), functools.cache(self._exchanged)
        self._around_once, self._spill_once = functools.cache(self._around), functools.cache(self._spill)
        self._streamed_once, self._network_once = functools.cache(self._streamed), functools.cache(self._network)

    def _links(self, mesh: MeshConfig) -> MeshLinks:
        return MeshLinks.of(self._topology, mesh)

    def microbatch(self, mesh: MeshConfig, *, num_microbatches: int, recompute: str) -> MicrobatchTimes:
        """The times of a microbatch on a mesh.

        Args:
          mesh: a mesh that is valid for the config (`Config.validate`).
          num_microbatches: number of microbatches in a replica's batch.
          recompute: what the backward pass makes again, as in `PipelineConfig`.

        Raises:
          ConfigError: when no link of the topology joins all devices of the mesh.
        """
        examples = self._config.data.global_batch_size // mesh.data // num_microbatches
        layer = mesh.along("tensor"), examples, recompute
        forward, backward_input, backward_weight = self._layer_once(*layer)
        load, store = self._streamed_once(mesh.along("data", "tensor"))
        outside, once, gather = self._around_once(mesh, num_microbatches)
        repeats, gathers = recompute == FULL, self._gathered_again(mesh, recompute) * gather
        return outside._replace(
            forward=forward + once.forward,
            backward_input=backward_input + once.backward_input + once.forward * repeats,
            backward_weight=backward_weight + gathers,
            exchange=sum(once) + once.forward * repeats + gathers,
            load=load,
            store=store,
            spill=self._spill_once(*layer),
        )

    def _around(self, mesh: MeshConfig, num_microbatches: int) -> tuple[MicrobatchTimes, LayerExchange, float]:
        """What does not depend on recomputation: all but the layers', their exchange, and that of a whole input."""
        examples = self._config.data.global_batch_size // mesh.data // num_microbatches
        over_pipe = self._system.vocabulary_over_pipe
        embed, head, embed_backward = self._edges_once(mesh.tensor * (mesh.pipe if over_pipe else 1), examples)
        links, whole = self._links_once(mesh.plain), examples * self._row_bytes
        part = whole / mesh.tensor if mesh.sequence_parallel else whole
        over_tensor = all_reduce_s(whole, links.rings["tensor"])
        along_pipe = all_reduce_s(part, links.rings["pipe"]) if over_pipe and mesh.pipe > 1 else 0.0
        outside = MicrobatchTimes(
            0.0,
            0.0,
            0.0,
            exchange=0.0,
            embed=embed + along_pipe + over_tensor,
            head=head + 2 * along_pipe + over_tensor,
            embed_backward=embed_backward + along_pipe,
            edge_exchange=4 * along_pipe + 2 * over_tensor,
            hops=self._hops(links, whole, part),
        )
        return outside, self._exchange(mesh, examples), all_gather_s(whole, links.rings["tensor"])

    def step(self, mesh: MeshConfig, *, num_parameters: float, streamed_rows: int = 0) -> StepTimes:
        """The times of a step outside the pipeline.

        Args:
          mesh: a mesh that is valid for the config (`Config.validate`).
          num_parameters: number of weights on the device that holds most.
          streamed_rows: number of rows of layers on a device whose weights and gradients wait on the host.
        """
        zero1 = self._config.optimizer.zero1
        rings = self._links_once(mesh.plain).rings["data"]
        reduce = reduce_scatter_s if zero1 else all_reduce_s
        return StepTimes(
            reduce(num_parameters * self._system.gradient_bytes, rings),
            all_gather_s(num_parameters * self._itemsize, rings) if zero1 else 0.0,
            self._update_s(num_parameters, mesh, streamed_rows),
        )

    def traffic(
        self,
        mesh: MeshConfig,
        *,
        placement: LayerPlacement,
        num_microbatches: int,
        recompute: str,
        num_parameters: float,
    ) -> tuple[Traffic, ...]:
        """What each axis of a mesh sends over each link in a step, for this project's `System`.

        The traffic is sorted by axis, and the links of each from the innermost outwards. The arguments are those of
        `microbatch` and `step`.
        """
        m, zero1, links = num_microbatches, self._config.optimizer.zero1, self._links_once(mesh.plain)
        examples = self._config.data.global_batch_size // mesh.data // m
        whole = examples * self._row_bytes
        part = whole / mesh.tensor if mesh.sequence_parallel else whole
        layers = max(sum(placement.layers_per_stage[stage] for stage in stages) for stages in placement.chunks)
        forward, backward = self._network_once(mesh.along("tensor")).sums
        in_layers = 2 * m * layers * (forward * (2 if recompute == FULL else 1) + backward)
        in_layers += m * layers * self._gathered_again(mesh, recompute)
        gathered: list[tuple[str, float, float]] = [  # axis, how often, and bytes; an all-reduce counts twice
            ("data", 1 if zero1 else 2, num_parameters * self._system.gradient_bytes),
            ("data", 1 if zero1 else 0, num_parameters * self._itemsize),
            ("pipe", 8 * m, part),
            ("tensor", 4 * m, whole),
        ]
        again = m * layers * forward  # under collective matmul, for each sum one input is gathered again
        around: list[tuple[str, float, Iterator[Share]]] = []
        if not mesh.collective_matmul:
            gathered.append(("tensor", in_layers, whole))
        else:
            pieces = self._exchanged_once(mesh.along("tensor"), examples).pieces
            if self._in_blocks:  # each block waits for the links by itself, and no block does when all come again
                gathered += [("tensor", pieces * in_layers, whole / pieces), ("tensor", again, whole)]
            else:
                rings = ring_shares(whole, links.rings["tensor"], ways=pieces)
                around.append(("tensor", in_layers + again, rings))
        shares = [(axis, times, all_gather_shares(size, links.rings[axis])) for axis, times, size in gathered]
        sent: dict[tuple[str, Link], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for axis, times, of_links in shares + around:
            for link, size, seconds in of_links:
                sent[axis, link][0] += times * size
                sent[axis, link][1] += times * seconds
        for link, messages in _messages(placement.stage_ranks, links).items():
            sent["pipe", link][0] += m * messages * part
            sent["pipe", link][1] += m * messages * send_s(part, link, senders=links.senders)
        found = (Traffic(axis, link, *amounts) for (axis, link), amounts in sent.items())
        return tuple(sorted(found, key=lambda each: (AXES.index(each.axis), self._topology.links.index(each.link))))

    def _exchange(self, mesh: MeshConfig, examples: int) -> LayerExchange:
        """Exposed seconds of the exchange in a layer, for a microbatch of `examples`."""
        whole, links = examples * self._row_bytes, self._links_once(mesh.plain).rings["tensor"]
        if not mesh.collective_matmul:
            once = all_reduce_s(whole, links)
            return LayerExchange(*(number * once for number in self._network_once(mesh.along("tensor")).sums))
        times, pieces = self._exchanged_once(mesh.along("tensor"), examples)
        if self._in_blocks:
            block, all_blocks = (all_gather_s(size, links) for size in (whole / pieces, whole))
            return exchange_of_blocks(times, number=pieces, block=block, whole=all_blocks)
        return exchange_of_rings(times, ranks=mesh.tensor, hop=hop_s(whole, links, ways=pieces))

    def _exchanged(self, mesh: MeshConfig, examples: int) -> "_Exchanged":
        config = self._sized(mesh, examples, "none")
        times = (
            ProductTimes(each.gathers, self._seconds(each.forward), self._seconds(each.backward_input))
            for each in exchanged_work(config, in_blocks=self._in_blocks)
        )
        sizes = num_sequences(config), config.model.seq_len // mesh.tensor
        return _Exchanged(tuple(times), num_blocks(*sizes, mesh.tensor) if self._in_blocks else num_ways(*sizes))

    def _seconds(self, *works: Work) -> float:
        chip, dtype = self._topology.chip, self._config.model.dtype
        return sum(work.seconds(chip, dtype, self._efficiency) for work in works)

    def _layer(self, mesh: MeshConfig, examples: int, recompute: str) -> tuple[float, float, float]:
        """Seconds of F, I (with what it recomputes) and W, without communication."""
        config = self._sized(mesh, examples, recompute)
        work = layer_work(config, flash=self._flash, in_blocks=self._in_blocks)
        return (
            self._seconds(work.forward),
            self._seconds(work.again, work.backward_input),
            self._seconds(work.backward_weight),
        )

    def _streamed(self, mesh: MeshConfig) -> tuple[float, float]:
        """Seconds in which a layer's weights come from the host, and in which its gradients go there."""
        if not self._config.pipeline.streams:
            return 0.0, 0.0
        copied = layer_bytes(dataclasses.replace(self._config, mesh=mesh))
        return copied.weights / self._host_bandwidth, copied.gradients / self._host_bandwidth

    def _spill(self, mesh: MeshConfig, examples: int, recompute: str) -> float:
        """Seconds in which what a layer's forward pass saves goes to the host, or comes back."""
        if not self._config.pipeline.spills:
            return 0.0
        stash = LayerMemory.of(self._sized(mesh, examples, recompute), self._backend).stash()
        return stash / self._host_bandwidth

    def _edges(self, shards: int, examples: int) -> tuple[float, ...]:
        work = edge_work(self._sized(MeshConfig(), examples, "none"), shards=shards)
        return tuple(map(self._seconds, work))

    def _sized(self, mesh: MeshConfig, examples: int, recompute: str) -> Config:
        """A config of one replica whose microbatches have `examples` examples."""
        data = dataclasses.replace(self._config.data, global_batch_size=examples)
        pipeline = PipelineConfig(recompute=recompute, stash_dtype=self._config.pipeline.stash_dtype)
        return dataclasses.replace(self._config, mesh=mesh, data=data, pipeline=pipeline)

    def _gathered_again(self, mesh: MeshConfig, recompute: str) -> int:
        """How many inputs a layer's backward pass gathers over tensor ranks once more, since it made them again."""
        # products in pieces gather their inputs again in any case (`LayerExchange`)
        if not mesh.sequence_parallel or mesh.collective_matmul or mesh.tensor == 1:
            return 0
        products = self._network_once(mesh.along("tensor")).products
        return sum(each.split == "outputs" and each.made_by in recomputed(recompute) for each in products)

    def _network(self, mesh: MeshConfig) -> Network:
        return network_of(dataclasses.replace(self._config, mesh=mesh))

    @property
    def _row_bytes(self) -> int:
        """Bytes of the residual stream of one example, which may have several sequences."""
        config = self._config
        return config.sequences_per_example * config.model.seq_len * config.model.hidden_size * self._itemsize

    def _hops(self, links: MeshLinks, whole: float, part: float) -> tuple[float, ...]:
        tensor, gathered = math.prod(ring.size for ring in links.rings["tensor"]), 0.0
        if self._system.scatters_hops:
            part, gathered = whole / tensor, all_gather_s(whole, links.rings["tensor"])
        seconds = {link: send_s(part, link, senders=links.senders) + gathered for link in set(links.hops)}
        return tuple(seconds[link] for link in links.hops) or (0.0,)

    def _update_s(self, num_parameters: float, mesh: MeshConfig, streamed_rows: int) -> float:
        """Seconds of an update: memory traffic and float32 products, or its copies to and from the host if longer."""
        optimizer, chip = self._config.optimizer, self._topology.chip
        mine = num_parameters / (mesh.data if optimizer.zero1 else 1)
        moments = num_moments(optimizer.name, optimizer.momentum)
        again, stored = self._config.pipeline.prediction == "momentum", self._config.pipeline.stores_last_update
        # It reads gradient, weight and moments, writes weight and moments, and reads the gradient again for its norm.
        # Prediction by momentum reads gradient, weight and moments once more, and repeats the products. Where
        # prediction stores the last update, it reads and writes it.
        moved = mine * FLOAT32 * (4 + 2 * moments + again * (2 + moments) + 2 * stored)
        dtype = "float32" if "float32" in chip.peak_flops else self._config.model.dtype
        config = dataclasses.replace(self._config, mesh=mesh)
        products = update_work(config)
        seconds = moved / chip.memory_bandwidth + (1 + again) * products.seconds(chip, dtype, self._efficiency)
        if not optimizer.offload:
            return seconds
        copied = update_bytes(config, num_parameters, streamed_rows=streamed_rows)
        return max(seconds, copied / self._host_bandwidth)


def _messages(stage_ranks: Sequence[int], links: MeshLinks) -> dict[Link, int]:
    """How many messages of a microbatch cross each link: activations and gradients, of the rank that sends most."""
    counts: dict[tuple[int, Link], int] = defaultdict(int)
    for first, second in itertools.pairwise(stage_ranks):
        if first != second:
            link = links.between(first, second)
            counts[first, link] += 1
            counts[second, link] += 1
    return {link: max(count for (_, other), count in counts.items() if other == link) for _, link in counts}
