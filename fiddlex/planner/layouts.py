"""The planner's problem and its search space: all layouts for a problem.

The space: data × pipe × tensor × outermost axis × schedule × chunks × microbatch × semantics × recompute × sequence
parallelism × collective matmul. The traits of a schedule say with how many chunks and under which semantics the planner
searches it (`fiddlex.schedules.traits`). The space leaves out layouts that cannot be better than others. It also leaves
out 2BW on more than `MOST_WAITING` ranks with so few microbatches that the ranks wait for updates, because unrolling
these pipelines would take longer than everything else. Invariant: every layout gives a valid config.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.config.families import family
from fiddlex.config.overrides import replaced
from fiddlex.config.sections import OUTERMOST_AXES
from fiddlex.config.values.recompute import FULL, PARTS, written
from fiddlex.config.values.stash import SAME
from fiddlex.costs.backend import backend_of
from fiddlex.errors import ScheduleError
from fiddlex.hardware.compilers import refused_width
from fiddlex.hardware.pieces import num_blocks, runs_in_blocks
from fiddlex.hardware.topology import Topology
from fiddlex.models.registry import network_of
from fiddlex.planner.closed_forms import Shape
from fiddlex.planner.cost_model import EFFICIENCY
from fiddlex.schedules.generators import GENERATORS, generator_of, make_schedule
from fiddlex.schedules.traits import NO_TRAITS, Generator, Traits, traits_of

HEADROOM = 0.1  # share of a device's memory that stays free, for the memory model's error (docs/memory.md)
MOST_WAITING = 8  # largest number of ranks of a pipeline that waits for updates under 2BW
SEMANTICS = ("sync", "2bw")
CHUNKS_TRIED = (1, 2, 3, 4)  # of a schedule without traits
OBJECTIVES = ("time", "cost", "memory")
# What of a config keeps less on the devices.
OFFLOAD: dict[str, Any] = {"optimizer.offload": True}
STREAM: dict[str, Any] = {"pipeline.weights_memory": "host"}
SPILL: dict[str, Any] = {"pipeline.stash_memory": "host"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The problem that the planner solves."""

    # the planner replaces mesh and pipeline, except for prediction, stash (type, memory) and where weights wait
    config: Config
    topology: Topology
    num_devices: int  # how many of the cluster's devices to use
    # bytes of each device that a layout may take; None: the chip's memory except for `HEADROOM`
    memory_bytes: int | None = None
    # what to minimize: `time` of a step, `cost` of a step (may use fewer devices), or `memory` of a device
    objective: str = "time"
    semantics: Sequence[str] = SEMANTICS  # weight semantics that a layout may have
    # `make_schedule`'s names of those for 2 ranks or more (chunk-major: 1 too); empty: all with traits, or no pipeline
    schedules: Sequence[str] = ()
    efficiency: float = EFFICIENCY  # share of the chip's peak that large products reach

    @property
    def further(self) -> dict[str, "Problem"]:
        """The same problem with less on the devices, where it allows that, by the text of what it sets besides."""
        places = [OFFLOAD] * self.can_offload
        places += [OFFLOAD | STREAM, OFFLOAD | STREAM | SPILL] * self.can_stream
        return {set_text(each): dataclasses.replace(self, config=replaced(self.config, each)) for each in places}

    @property
    def can_offload(self) -> bool:
        """Whether some layout can have `optimizer.offload`."""
        return self.topology.host is not None and "sync" in self.semantics

    @property
    def can_stream(self) -> bool:
        """Whether some layout can have `pipeline.weights_memory=host`, which `Config.validate` restricts."""
        config = self.config
        return self.can_offload and config.model.dtype != "float16" and not config.train.sample_tokens

    def refused_width(self, replicas: int) -> str:
        """Why no layout of so many replicas can have the layers' weights on the host; empty: some may, or need not."""
        if not self.config.pipeline.streams:
            return ""
        model, zero1 = self.config.model, self.config.optimizer.zero1
        return refused_width(self.topology.platform, model.hidden_size, replicas=replicas, zero1=zero1)

    @property
    def host_limit(self) -> int:
        """Bytes that each device may take of the memory of its host."""
        return self.topology.host.limit if self.topology.host else 0

    @property
    def limit(self) -> int:
        """Bytes that a layout may take on each device."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int(self.topology.chip.memory_bytes * (1 - HEADROOM))


class Layout(NamedTuple):
    """A point of the space."""

    mesh: MeshConfig
    schedule: str
    chunks: int  # number of stages on each rank
    num_microbatches: int  # of a replica's batch
    semantics: str
    recompute: str  # as in `PipelineConfig`

    @property
    def shape(self) -> Shape:
        """The shape of the layout's pipeline, as if nothing waited on the host."""
        return Shape(self.schedule, self.mesh.pipe, self.chunks, self.num_microbatches, self.semantics)

    def applied(self, config: Config) -> Config:
        """The config with this layout in place of its own mesh and pipeline; see `planned_pipeline`."""
        pipeline = planned_pipeline(
            config,
            self.semantics,
            self.recompute,
            schedule=self.schedule,
            num_chunks=self.chunks,
            num_microbatches=self.num_microbatches,
        )
        return dataclasses.replace(config, mesh=copy.copy(self.mesh), pipeline=pipeline)  # keys stay as they are


class Group(NamedTuple):
    """Layouts with the same number of devices along each axis and of microbatches: all combinations of the rest."""

    pipelines: list[tuple[str, int, str]]  # schedule, chunks and semantics
    num_microbatches: int
    meshes: list[MeshConfig]
    recompute: Sequence[str]

    @property
    def combinations(self) -> int:
        """Number of layouts with one of the pipelines."""
        return len(self.meshes) * len(self.recompute)

    def layouts(self, schedule: str, chunks: int, semantics: str) -> Iterator[Layout]:
        for recompute, mesh in itertools.product(self.recompute, self.meshes):
            yield Layout(mesh, schedule, chunks, self.num_microbatches, semantics, recompute)


def planned_pipeline(config: Config, semantics: str, recompute: str = "none", **fields: Any) -> PipelineConfig:
    """The pipeline section of a plan; stash and weights wait where those of `config` wait."""
    return PipelineConfig(
        semantics=semantics,
        recompute=recompute,
        stash_memory=config.pipeline.stash_memory,
        weights_memory=config.pipeline.weights_memory,
        stash_dtype=planned_stash(config, recompute),
        **planned_prediction(config, semantics),
        **fields,
    )


def planned_stash(config: Config, recompute: str) -> str:
    """`pipeline.stash_dtype` of `config`, which the planner keeps, since another type trains other weights."""
    # full recomputation stashes only the inputs of layers
    return SAME if recompute == FULL else config.pipeline.stash_dtype


def planned_prediction(config: Config, semantics: str) -> dict[str, Any]:
    """The fields of the prediction: those of `config`, or else what docs/prediction.md recommends; none for sync."""
    own = config.pipeline
    if semantics == "sync":
        return {}
    if own.prediction != "none":
        return {name: getattr(own, name) for name in ("prediction", "prediction_order", "prediction_scale")}
    # Without momentum, extrapolation makes training less stable.
    return {"prediction": "extrapolate", "prediction_order": 2} if config.optimizer.decay_of_momentum else {}


def set_text(fields: Mapping[str, Any]) -> str:
    """Fields and their values in words, as in `optimizer.offload=True with pipeline.weights_memory=host`."""
    first, *others = (f"{path}={value}" for path, value in fields.items())
    return f"{first} with {' and '.join(others)}" if others else first


def layouts(problem: Problem) -> Iterator[Layout]:
    """All layouts of the space, from the divisors of the devices, the heads and the batch."""
    for group in groups(problem):
        for pipeline in group.pipelines:
            yield from group.layouts(*pipeline)


def groups(problem: Problem) -> Iterator[Group]:
    """All layouts of the space, grouped."""
    batch = problem.config.data.global_batch_size
    flash = backend_of(problem.topology.compiler).flash_kernel(problem.config).name
    modes = recompute_choices(problem.config, flash=bool(flash))
    variant = functools.cache(dataclasses.replace)  # gives equal meshes as one object, which caches find fastest
    for sizes in meshes(problem):
        parallel = (False, True) if splits_sequence(problem, sizes) else (False,)
        orders = outermost_axes(problem, sizes)
        for number, sequence in itertools.product(_divisors(batch // sizes.data), parallel):
            matmuls = matmul_choices(problem, sequence, sizes.tensor, batch // sizes.data // number)
            variants = [
                variant(sizes, sequence_parallel=sequence, outermost=outermost, collective_matmul=matmul)
                for outermost, matmul in itertools.product(orders, matmuls)
            ]
            yield Group(list(_pipelines(problem, sizes.pipe, number)), number, variants, modes)


def meshes(problem: Problem) -> Iterator[MeshConfig]:
    """All meshes that the model can be cut for, without sequence parallelism and with `data` outermost."""
    model, batch = problem.config.model, problem.config.data.global_batch_size
    for devices in _numbers_of_devices(problem):
        for tensor in _divisors(math.gcd(model.num_heads, model.mlp_size, devices)):
            if model.kv_heads % tensor and tensor % model.kv_heads:
                continue
            for pipe in _divisors(devices // tensor):
                data = devices // tensor // pipe
                if pipe <= model.num_layers and batch % data == 0 and not problem.refused_width(data):
                    yield MeshConfig(data=data, pipe=pipe, tensor=tensor)


def _pipelines(problem: Problem, pipe: int, num_microbatches: int) -> Iterator[tuple[str, int, str]]:
    """All (schedule, chunks, semantics) for these numbers of pipe ranks and microbatches."""
    layers = problem.config.model.num_layers
    least = pipe if pipe <= MOST_WAITING else 2 * (pipe - 1)  # fewest microbatches without a flush
    for name, traits in schedules(problem):
        if num_microbatches % traits.period(pipe) or (problem.schedules and pipe == 1 and not traits.chunk_major):
            continue
        searched = [semantics for semantics in problem.semantics if semantics in traits.searched]
        if problem.config.optimizer.offload:  # without a flush, weights are predicted, which takes all of them at once
            searched = [semantics for semantics in searched if semantics == "sync"]
        for chunks, semantics in itertools.product(traits.chunks, searched):
            if chunks * pipe > layers or (semantics != "sync" and (pipe == 1 or num_microbatches < least)):
                continue
            if traits.slots is None and why_missing(name, generator_of(name), pipe, chunks, num_microbatches):
                continue
            yield name, chunks, semantics
            if pipe == 1 and not traits.chunk_major:  # without a pipeline, a further schedule is no better
                return


def schedules(problem: Problem) -> Iterator[tuple[str, Traits]]:
    """The schedules of the space, with their traits; those that a user asks for are searched with a flush at least.

    Those in which weights can come from the host are searched only if `pipeline.weights_memory` asks for that, and then
    no others.
    """
    streams = problem.config.pipeline.by_chunk
    if not problem.schedules:
        for name, generator in GENERATORS.items():
            traits = traits_of(generator)
            if traits is not None and traits.chunk_major == streams:
                yield name, traits
    for name in problem.schedules:
        traits = traits_of(generator_of(name)) or dataclasses.replace(NO_TRAITS, chunks=CHUNKS_TRIED)
        if traits.chunk_major or not streams:
            yield name, dataclasses.replace(traits, searched=traits.searched or ("sync",))


@functools.lru_cache(maxsize=4096)
def why_missing(name: str, generator: Generator, pipe: int, chunks: int, num_microbatches: int) -> str:
    """The error of a schedule for these sizes; empty if it exists. The cache's key has its generator: files change."""
    try:
        make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    except ScheduleError as error:
        return str(error)
    return ""


def recompute_choices(config: Config, *, flash: bool) -> tuple[str, ...]:
    """The values of `pipeline.recompute` to search; with `flash`, a kernel recomputes attention's inside anyway."""
    if not family(config.model.family).attends:  # nothing knows the parts of such a layer
        return "none", FULL
    made = {each.made_by for each in network_of(config).products}
    useful = {"attention": not flash, "masks": config.model.dropout > 0}
    parts = [part for part in PARTS if useful.get(part, part in made)]
    lists = itertools.chain.from_iterable(itertools.combinations(parts, size) for size in range(len(parts) + 1))
    return *map(written, lists), FULL


def outermost_axes(problem: Problem, mesh: MeshConfig) -> tuple[str, ...]:
    """The axes that may be outermost; only one where the order of the axes changes nothing."""
    innermost = problem.topology.links[0].devices
    one_link = not innermost or mesh.num_devices <= innermost
    alone = any(mesh.sizes[axis] == 1 for axis in OUTERMOST_AXES)
    return OUTERMOST_AXES[:1] if one_link or alone else OUTERMOST_AXES


def splits_sequence(problem: Problem, mesh: MeshConfig) -> bool:
    """Whether the tensor ranks of a mesh can have sequence parallelism."""
    model = problem.config.model
    return mesh.tensor > 1 and model.seq_len % mesh.tensor == 0 and family(model.family).sequence_parallel


def matmul_choices(problem: Problem, sequence_parallel: bool, tensor: int, examples: int) -> tuple[bool, ...]:
    """The values that `mesh.collective_matmul` may have.

    Neither value is always better: collective matmul hides exchange and saves less, but cuts products into pieces that
    read their kernels again, and exchanges more in backward passes. In a single block it would only exchange more.
    """
    if not sequence_parallel or not family(problem.config.model.family).collective_matmul:
        return (False,)
    length, sequences = problem.config.model.seq_len // tensor, examples * problem.config.sequences_per_example
    in_blocks = runs_in_blocks(backend_of(problem.topology.compiler).platform)
    return (False,) if in_blocks and num_blocks(sequences, length, tensor) == 1 else (False, True)


def _numbers_of_devices(problem: Problem) -> list[int]:
    """The problem's number of devices; with objective `cost` also a half of it, a quarter, and so on."""
    number, numbers = problem.num_devices, [problem.num_devices]
    while problem.objective == "cost" and number % 2 == 0:
        number //= 2
        numbers.append(number)
    return numbers


@functools.lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
