"""PipeDream's and Piper's answers for a config's model or for a profile, on a cluster of the catalogue.

Both get the same layers and the same microbatches. PipeDream's formulation has no tensor ranks, no recomputation and no
cap on memory; what its pipeline would take is counted by Piper's formula. The bytes of weights that PipeDream's
replicas exchange are divided by the microbatches of a batch, as in Piper, so that both sum gradients once a batch.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fiddlex.config.rules import near_multiples
from fiddlex.errors import ConfigError, DeviceError
from fiddlex.hardware.topology import Topology
from fiddlex.planner.layouts import Problem
from fiddlex.planner.plans import Plan
from fiddlex.planner.report import describe
from fiddlex.planner.search import search
from fiddlex.terminal.readable import counted, readable_size, readable_time
from fiddlex.tools.partition import Layer, Level, pipedream
from fiddlex.tools.unequal_stages.chain import Chain, Choice, Part, ShardedLayer, StageProblem
from fiddlex.tools.unequal_stages.model_chain import model_problem
from fiddlex.tools.unequal_stages.piper import Piper, UnequalPipeline
from fiddlex.tools.unequal_stages.profile_graph import ProfiledLayer

MOST_EXAMPLES = 64  # of a microbatch; larger ones are not tried
EQUAL = "Piper, equal"  # stages with equal replicas and tensor sizes
FASTER = 0.99  # share of a batch's seconds that a larger microbatch must reach, since it fills the pipeline more slowly


class Answer(NamedTuple):
    """A partitioner's answer."""

    name: str
    pipeline: UnequalPipeline  # the pipeline, with seconds and bytes of its stages by Piper's formulas
    seconds: float  # seconds between two microbatches by the partitioner's own formulas
    num_microbatches: int  # microbatches of a batch
    examples: int  # examples of a microbatch; 0: unknown, those of a profile

    @property
    def batch_s(self) -> float:
        """Seconds of a batch in a pipeline that is always full."""
        return self.num_microbatches * self.seconds

    @property
    def flushed_s(self) -> float:
        """Seconds of a batch that fills the pipeline and drains it."""
        return self.batch_s + self.pipeline.filling_s


@dataclasses.dataclass(frozen=True)
class Answers:
    """All answers to one question."""

    title: str  # the question in one line
    topology: Topology
    num_devices: int
    memory_bytes: int  # bytes that a stage may take on each device
    unequal: tuple[Answer, ...]  # the partitioners' answers
    uniform: tuple[Plan, ...] | None = None  # the planner's best layouts; None: a profile has none
    shortage: str = ""  # why Piper has no answer; empty when it has one
    operations: tuple[tuple[str, ...], ...] = ()  # of a profile, the names of each layer's operations


def cluster_levels(topology: Topology, num_devices: int) -> list[Level]:
    """PipeDream's levels of a cluster, one for each link that its devices use.

    All devices of a group send at once, so that a group has the bandwidth of its devices together.
    """
    outermost = topology.link_between(0, num_devices - 1)
    levels, inside = list[Level](), 1
    for link in topology.links[: topology.links.index(outermost) + 1]:
        joined = num_devices if link is outermost else link.devices
        if joined % inside or num_devices % joined:
            group = inside if joined % inside else joined
            raise ConfigError(
                f"--num_devices={num_devices} are not whole groups of the {group} devices that a link of topology "
                f"{topology.name} joins, which PipeDream's levels are. Use {near_multiples(num_devices, group)}."
            )
        levels.append(Level(joined // inside, inside * link.bandwidth))
        inside = joined
    return levels


def answers_for_model(problem: Problem, *, keep: int) -> Answers:
    """The answers for a config's model, each at the microbatch size with which its batch is fastest.

    The batch is that of a full pipeline, or with filling and draining if all semantics of the problem flush. The sizes
    are powers of two that divide the batch, up to `MOST_EXAMPLES`; a larger one must make the batch 1% faster.
    PipeDream's answer has the size of Piper's. `keep` is the number of uniform layouts.
    """
    levels = cluster_levels(problem.topology, problem.num_devices)
    uniform, flushes = tuple(search(problem, keep=keep).plans), set(problem.semantics) == {"sync"}
    best, sizes, shortage = dict[str, Answer](), dict[int, StageProblem](), ""
    for examples in _microbatch_sizes(problem.config.data.global_batch_size):
        sizes[examples] = model_problem(problem, examples)
        piper, number = Piper(sizes[examples]), sizes[examples].num_microbatches
        try:
            for name, search_for in (("Piper", piper.fastest), (EQUAL, piper.fastest_equal)):
                allowed = FASTER * _seconds(best[name], flushes=flushes) if name in best else math.inf
                if found := search_for(below=allowed / number):
                    answer = Answer(name, found, found.seconds, number, examples)
                    if _seconds(answer, flushes=flushes) < allowed:
                        best[name] = answer
        except DeviceError as error:  # larger microbatches need no less
            shortage = "" if best else str(error)
            break
    examples = best["Piper"].examples if best else 1
    unequal = _pipedream(sizes[examples], levels, examples), *best.values()
    title, topology = describe(problem), problem.topology
    return Answers(title, topology, problem.num_devices, problem.limit, unequal, uniform, shortage)


def _seconds(answer: Answer, *, flushes: bool) -> float:
    return answer.flushed_s if flushes else answer.batch_s


def _microbatch_sizes(batch: int) -> Iterator[int]:
    examples = 1
    while examples <= MOST_EXAMPLES and batch % examples == 0:
        yield examples
        examples *= 2


def answers_for_profile(
    layers: Sequence[ProfiledLayer], topology: Topology, num_devices: int, *, memory_bytes: int, num_microbatches: int
) -> Answers:
    """The answers for a profile, whose minibatches are the microbatches here.

    A profile does not say what tensor ranks or recomputation would take, so that stages have neither. A device keeps
    the weights and a sum of gradients, as large as they are.
    """
    chain = Chain(
        tuple(
            ShardedLayer(
                (Choice(each.seconds, each.activation_bytes),),
                each.sent_bytes,
                each.weight_bytes,
                2 * each.weight_bytes,
            )
            for each in layers
        )
    )
    levels, bandwidth = cluster_levels(topology, num_devices), topology.link_between(0, num_devices - 1).bandwidth
    piper = Piper(StageProblem({1: chain}, num_devices, memory_bytes, bandwidth, num_microbatches))
    found, shortage = [_pipedream(piper.problem, levels, 0)], ""
    try:
        for name, pipeline in (("Piper", piper.fastest()), (EQUAL, piper.fastest_equal())):
            if pipeline:
                found.append(Answer(name, pipeline, pipeline.seconds, num_microbatches, 0))
    except DeviceError as error:
        shortage = str(error)
    title = (
        f"{counted(sum(len(each.names) for each in layers), 'operation')} as {counted(len(layers), 'layer')}, "
        f"{readable_time(sum(each.seconds for each in layers))} a microbatch, "
        f"{readable_size(sum(each.weight_bytes for each in layers))} of weights; {num_devices:,} {topology.chip.name}, "
        f"{readable_size(memory_bytes)} of each to use"
    )
    names = tuple(each.names for each in layers)
    return Answers(title, topology, num_devices, memory_bytes, tuple(found), shortage=shortage, operations=names)


def _pipedream(problem: StageProblem, levels: Sequence[Level], examples: int) -> Answer:
    """PipeDream's answer for the layers of a problem without tensor ranks, each run in its fastest way."""
    chain, number = problem.chains[1], problem.num_microbatches
    chain = chain._replace(layers=tuple(each._replace(choices=(min(each.choices),)) for each in chain.layers))
    layers = [Layer(each.choices[0].seconds, each.output_bytes, each.weight_bytes / number) for each in chain.layers]
    found = pipedream(layers, levels)
    parts = [Part(stage.first, stage.last, stage.replicas, 1) for stage in found.of_devices]
    pipeline = Piper(dataclasses.replace(problem, chains={1: chain})).pipeline_of(parts)
    return Answer("PipeDream", pipeline, found.seconds, number, examples)
