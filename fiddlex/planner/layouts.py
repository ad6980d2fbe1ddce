"""What the planner searches: a problem, and all layouts that there are for it.

The space: data × pipe × tensor × schedule × chunks × microbatch × semantics × recompute × sequence parallelism. The
traits of a schedule say with how many chunks and under which semantics it is searched (`fiddlex.schedules.traits`).
Left out is what cannot be better: a pipeline of one rank under another name; recomputing attention where a flash kernel
does so anyway. Also left out is 2BW on more than `MOST_WAITING` ranks with so few microbatches that they wait for
updates: it would take longer to unroll than all the rest. Invariant: every layout is a config that validates.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fiddlex.cluster.topology import Topology
from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.config.sections import RECOMPUTE_MODES
from fiddlex.costs.backend import backend_of
from fiddlex.planner.closed_forms import Shape
from fiddlex.planner.cost_model import EFFICIENCY
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.traits import traits_of

HEADROOM = 0.1  # of a device's memory left free: what the memory model may be wrong by (docs/memory.md)
MOST_WAITING = 8  # ranks of a pipeline that waits for updates under 2BW
SEMANTICS = ("sync", "2bw")
OBJECTIVES = ("time", "cost", "memory")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is searched for.

    Attributes:
      config: of the run; its mesh and pipeline are what is looked for, its batch and optimizer stay.
      topology: the cluster.
      num_devices: of it.
      memory_bytes: of each device; None: the chip's, but for `HEADROOM`.
      objective: what is to be least: `time` of a step, `cost` of a step, for which fewer devices may be taken, or
        `memory`.
      semantics: that are allowed.
      efficiency: see `cost_model.CostModel`.
    """

    config: Config
    topology: Topology
    num_devices: int
    memory_bytes: int | None = None
    objective: str = "time"
    semantics: Sequence[str] = SEMANTICS
    efficiency: float = EFFICIENCY

    @property
    def limit(self) -> int:
        """Bytes that a layout may take."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return int(self.topology.chip.memory_bytes * (1 - HEADROOM))


class Layout(NamedTuple):
    """A point of the space."""

    data: int
    pipe: int
    tensor: int
    sequence_parallel: bool
    schedule: str
    chunks: int
    num_microbatches: int
    semantics: str
    recompute: str

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        return self.data * self.pipe * self.tensor

    @property
    def shape(self) -> Shape:
        """Its pipeline."""
        return Shape(self.schedule, self.pipe, self.chunks, self.num_microbatches, self.semantics)

    def applied(self, config: Config) -> Config:
        """A config with this layout in place of its own."""
        mesh = MeshConfig(self.data, self.pipe, self.tensor, self.sequence_parallel)
        pipeline = PipelineConfig(
            schedule=self.schedule,
            num_chunks=self.chunks,
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
            semantics=self.semantics,
        )
        return dataclasses.replace(config, mesh=mesh, pipeline=pipeline)


def layouts(problem: Problem) -> Iterator[Layout]:
    """The space, by divisors of the devices, the heads and the batch."""
    model, batch = problem.config.model, problem.config.data.global_batch_size
    flash = backend_of(problem.topology.compiler).runs_flash(model)
    modes = [mode for mode in RECOMPUTE_MODES if not (flash and mode == "selective")]
    for devices in _numbers_of_devices(problem):
        for tensor in _divisors(math.gcd(math.gcd(model.num_heads, model.mlp_size), devices)):
            for pipe in _divisors(devices // tensor):
                data = devices // tensor // pipe
                if pipe > model.num_layers or batch % data:
                    continue
                parallel = (False, True) if tensor > 1 and model.seq_len % tensor == 0 else (False,)
                for number, sequence in itertools.product(_divisors(batch // data), parallel):
                    for schedule, chunks, semantics in _pipelines(problem, pipe, number):
                        for recompute in modes:
                            yield Layout(data, pipe, tensor, sequence, schedule, chunks, number, semantics, recompute)


def _pipelines(problem: Problem, pipe: int, num_microbatches: int) -> Iterator[tuple[str, int, str]]:
    """Schedule, chunks and semantics that there are for so many ranks and microbatches."""
    layers = problem.config.model.num_layers
    least = pipe if pipe <= MOST_WAITING else 2 * (pipe - 1)  # microbatches where the pipeline is not flushed
    for name, generator in GENERATORS.items():
        traits = traits_of(generator)
        if traits is None or num_microbatches % traits.period(pipe):
            continue
        searched = [semantics for semantics in problem.semantics if semantics in traits.searched]
        for chunks, semantics in itertools.product(traits.chunks, searched):
            if chunks * pipe > layers or (semantics != "sync" and (pipe == 1 or num_microbatches < least)):
                continue
            yield name, chunks, semantics
            if pipe == 1:
                return


def _numbers_of_devices(problem: Problem) -> list[int]:
    """All of them; where cost counts also a half of them, a quarter, and so on."""
    number, numbers = problem.num_devices, [problem.num_devices]
    while problem.objective == "cost" and number % 2 == 0:
        number //= 2
        numbers.append(number)
    return numbers


@functools.lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
