"""Piper's partitioner: stages that differ in layers, replicas and tensor size, under a cap on each device's memory.

The model of Tarnawski et al., Piper (NeurIPS 2021), sections 3 and 4. A batch has N microbatches, of which each replica
of a stage runs the d-th part. With d replicas of t devices each, a stage takes between two microbatches

    seconds = Σ p / d + 2·(c_in + c_out) / (d·B) + 4·(d − 1)·Σ w / (d·N·B)

for the passes through its layers, the activations and their gradients that it exchanges with the stages before and
after it, and the sum of gradients, which N microbatches share. The terms are added: nothing overlaps, as in the
published code. In 1F1B a stage keeps y = ⌈s / d⌉ microbatches, where s is the sum of the replicas of this stage and of
all later ones, and so takes

    bytes = y·Σ stash + Σ kept + Σ divided / d + working.

Each layer of a stage chooses for itself what it recomputes (`choices`). The numbers of replicas divide N and add up to
no more than N. The pipeline is as slow as its slowest stage. Devices may be left unused.

The search halves the interval of the seconds, moves both ends to times that stages can have, and asks `decision`
whether a pipeline takes no more. Invariant: no pipeline of this kind within the memory is faster, up to
`choices.POINTS`; and of those that are as fast, none takes fewer devices.

The published code (msr-fiddle/piper, algo.cpp) notes that its entries allow up to so many devices and replicas, where
the paper's have exactly so many; this changes no answer. It chooses recomputation by the heuristic that `choices`
names. It takes the factor 4 from PipeDream's code, as a parameter server would exchange; a ring exchanges 2 bytes for
each byte of w.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fiddlex.errors import DeviceError
from fiddlex.terminal.readable import counted, readable_size
from fiddlex.tools.unequal_stages.chain import Choice, Part, StageProblem
from fiddlex.tools.unequal_stages.choices import Frontiers
from fiddlex.tools.unequal_stages.decision import Decision
from fiddlex.tools.unequal_stages.stage_costs import StageCosts

_EQUAL = 1e-8  # relative difference below which two times count as equal; more than `decision.ROUNDING`


class Stage(NamedTuple):
    """A stage of a pipeline."""

    first: int  # number of its first layer
    last: int  # number of its last layer
    replicas: int
    tensor: int  # number of tensor ranks of each replica
    choices: tuple[Choice, ...]  # what each layer recomputes, with its seconds and bytes
    seconds: float  # seconds between two microbatches
    in_flight: int  # number of microbatches that each replica keeps
    memory_bytes: float  # bytes on each device

    @property
    def num_devices(self) -> int:
        return self.replicas * self.tensor

    @property
    def passes_s(self) -> float:
        """Seconds of one microbatch's passes through the stage."""
        return sum(choice.seconds for choice in self.choices)


class UnequalPipeline(NamedTuple):
    """A pipeline of stages, in order."""

    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        """Seconds between two microbatches when the pipeline is full."""
        return max(stage.seconds for stage in self.stages)

    @property
    def num_devices(self) -> int:
        return sum(stage.num_devices for stage in self.stages)

    @property
    def memory_bytes(self) -> float:
        """Bytes on the device that needs most."""
        return max(stage.memory_bytes for stage in self.stages)

    @property
    def filling_s(self) -> float:
        """Seconds that a flush adds to a batch: of one microbatch's passes through all stages but the slowest.

        It is (p − 1)(F + B) for p stages that are alike, as for 1F1B.
        """
        slowest = max(self.stages, key=lambda stage: stage.seconds)
        return sum(stage.passes_s for stage in self.stages) - slowest.passes_s


class Piper:
    """A problem with the tables that all its searches share."""

    def __init__(self, problem: StageProblem):
        self.problem = problem.validate()
        self._frontiers = {size: Frontiers(chain.layers) for size, chain in problem.chains.items()}
        self._costs = StageCosts(problem)
        self._sizes = [
            (replicas, tensor)
            for tensor in sorted(problem.chains)
            for replicas in problem.replica_counts()
            if replicas * tensor <= problem.num_devices
        ]

    def fastest(self, *, below: float = math.inf) -> UnequalPipeline | None:
        """The fastest pipeline; None: none takes less than `below` seconds between two microbatches.

        Raises:
          DeviceError: when no pipeline is within the memory; the message gives the least that one needs.
        """
        found = self._search(self._decision(self._sizes), below)
        if found is None and below == math.inf:
            raise DeviceError(self._too_little())
        return found

    def fastest_equal(self, *, below: float = math.inf) -> UnequalPipeline | None:
        """The fastest pipeline whose stages have equally many replicas of one tensor size, and may differ in layers.

        It is None if none within the memory takes less than `below` seconds between two microbatches.
        """
        best: UnequalPipeline | None = None
        for size in self._sizes:
            no_slower = best.seconds * (1 + 3 * _EQUAL) if best else math.inf
            found = self._search(self._decision([size]), min(below, no_slower))
            if found is None:
                continue
            if best is None or found.seconds < best.seconds * (1 - _EQUAL) or found.num_devices < best.num_devices:
                best = found
        return best

    def least_memory(self) -> int:
        """Bytes, to 0.1%, of the smallest cap within which there is a pipeline."""
        most = self._decision(self._sizes).whole_bytes
        least = 0.0
        while most - least > 1e-3 * most:
            middle = (least + most) / 2
            found = self._decision(self._sizes, middle).pipeline_within(math.inf)
            least, most = (least, middle) if found else (middle, most)
        return math.ceil(most)

    def pipeline_of(self, parts: Sequence[Part]) -> UnequalPipeline:
        """The pipeline of given parts, each with the fastest choices within the memory, else those that need least."""
        stages, later = list[Stage](), 0
        for part in reversed(parts):
            later += part.replicas
            stages.append(self._stage(part, -(-later // part.replicas)))
        return UnequalPipeline(tuple(reversed(stages)))

    def _decision(self, sizes: Sequence[tuple[int, int]], memory_bytes: float | None = None) -> Decision:
        limit = self.problem.memory_bytes if memory_bytes is None else memory_bytes
        return Decision(self.problem, self._frontiers, self._costs, sizes=sizes, memory_bytes=limit)

    def _too_little(self) -> str:
        problem, need = self.problem, readable_size(self.least_memory())
        return (
            f"No pipeline of stages on {counted(problem.num_devices, 'device')} fits "
            f"{readable_size(problem.memory_bytes)} a device, whatever its stages recompute: the smallest need is "
            f"{need}. Allow more memory, or use more devices or smaller microbatches."
        )

    def _stage(self, part: Part, in_flight: int) -> Stage:
        size, layers = (part.replicas, part.tensor), (part.first, part.last)
        fixed, extra = float(self._costs.fixed_bytes(*size)[layers]), float(self._costs.extra_s(*size)[layers])
        room = self.problem.memory_bytes - fixed
        choices = self._frontiers[part.tensor].fastest(*layers, in_flight=in_flight, room=room)
        seconds = sum(choice.seconds for choice in choices) / part.replicas + extra
        stash = in_flight * sum(choice.stash_bytes for choice in choices)
        return Stage(*part, choices, seconds, in_flight, fixed + stash)

    def _search(self, decision: Decision, below: float) -> UnequalPipeline | None:
        """The fastest pipeline that takes less than `below`, by halving the interval of its seconds."""
        parts = decision.pipeline_within(below * (1 - _EQUAL))
        if parts is None:
            return None
        best, least = self.pipeline_of(parts), decision.least_s
        while least < best.seconds * (1 - _EQUAL):
            middle = min((least + best.seconds) / 2, best.seconds * (1 - _EQUAL))
            parts = decision.pipeline_within(middle)
            if parts is None:
                least = decision.next_s(middle)
            else:
                best = self.pipeline_of(parts)
        fewest = decision.pipeline_within(best.seconds * (1 + _EQUAL))
        assert fewest is not None
        return self.pipeline_of(fewest)
