"""Finds the cut of a model's layers into stages with which a pipeline runs fastest.

PipeDream (`fiddlex.tools.partition`) minimizes the time of the slowest stage, embedding and head among its layers, over
all numbers of stages and replicas. In this executor the schedule gives the stages and their ranks, all stages have as
many replicas, all ranks share the work of embedding and head, and all layers of a model take the same time. So the
slowest stage is fastest in every cut whose largest stage has ⌈layers / stages⌉ layers, and most models have many such
cuts. The lockstep clock (`fiddlex.simulate.lockstep`) distinguishes them: a tick lasts as long as its longest action,
and a cut is faster if long actions share ticks. Where ranks have different numbers of stages, the even cut need not be
one of the fastest.

The search is best first: from the fastest cut so far to all cuts that have one layer in another stage. It ends when it
has tried all cuts or `MOST_TRIED` of them. Invariant: of the cuts that the search tried none is faster than its result,
and none that is as fast has a smaller largest stage, whose layers determine the memory of all chunks
(`LayerPlacement.rows_per_chunk`).
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.planner.predict import pipeline_of
from fiddlex.planner.times import MicrobatchTimes
from fiddlex.schedules.placement import LayerPlacement

MOST_TRIED = 400
# Cuts whose times differ by less count as equally fast.
ALIKE = 1e-2  # share of a batch's time, less than predictions are exact to

LayersPerStage = tuple[int, ...]


class Balanced(NamedTuple):
    """The result of a search."""

    cut: LayersPerStage
    seconds: float  # of a batch in the pipeline
    even_cut: LayersPerStage  # whose larger stages are the first
    even_seconds: float
    num_tried: int  # number of cuts that the search tried


def balance(config: Config, times: MicrobatchTimes, *, most_tried: int = MOST_TRIED) -> Balanced:
    """The fastest cut that the search finds; the even cut where that is as fast. Ignores the config's own cut."""
    pipeline = pipeline_of(replaced(config, {"pipeline.layers_per_stage": ""}))
    ranks, even = pipeline.placement.stage_ranks, pipeline.placement.layers_per_stage

    def seconds(cut: LayersPerStage) -> float:
        return pipeline.batch_seconds(times.costs(LayerPlacement(ranks, cut)))

    # Weights that come from the host come in rows, padding included, and the pipeline is the one of this many rows.
    most_layers = max(even) if config.pipeline.by_chunk else config.model.num_layers
    tried = _tried(seconds, _starts(even), most_layers=most_layers, most_tried=most_tried)
    slowest = min(tried.values()) * (1 + ALIKE)
    as_fast = [cut for cut, time in tried.items() if time <= slowest]
    best = even if even in as_fast else min(as_fast, key=lambda cut: (max(cut), tried[cut]))
    return Balanced(best, tried[best], even, tried[even], len(tried))


def _starts(even: LayersPerStage) -> list[LayersPerStage]:
    """Cuts to begin with, whose stages differ by one layer at most: the larger ones first, last, and spread evenly."""
    number, layers = len(even), sum(even)
    ends = [layers * stage // number for stage in range(number + 1)]
    spread = tuple(end - start for start, end in itertools.pairwise(ends))
    return [even, even[::-1], spread, spread[::-1]]


def _tried(
    seconds: Callable[[LayersPerStage], float], starts: Sequence[LayersPerStage], *, most_layers: int, most_tried: int
) -> dict[LayersPerStage, float]:
    """The cuts that the search tries, in order, and the time of each; the first of `starts` whatever the limits are."""
    tried: dict[LayersPerStage, float] = {}
    queue: list[tuple[float, int, int, LayersPerStage]] = []

    def add(cuts: Sequence[LayersPerStage] | Iterator[LayersPerStage]) -> None:
        for cut in cuts:
            if tried and len(tried) >= most_tried:
                return
            if cut not in tried and max(cut) <= most_layers:
                tried[cut] = seconds(cut)
                heapq.heappush(queue, (tried[cut], max(cut), len(tried), cut))

    add(starts)
    while queue and len(tried) < most_tried:
        *_, cut = heapq.heappop(queue)
        add(_neighbours(cut))
    return tried


def _neighbours(cut: LayersPerStage) -> Iterator[LayersPerStage]:
    """The cuts in which one layer has gone to another stage, to near stages first."""
    number = len(cut)
    for distance in range(1, number):
        for source in range(number):
            for target in (source - distance, source + distance):
                if cut[source] > 1 and 0 <= target < number:
                    changed = list(cut)
                    changed[source] -= 1
                    changed[target] += 1
                    yield tuple(changed)
