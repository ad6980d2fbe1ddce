"""The times from which the planner makes the time of a step: of a microbatch, and of what is outside the pipeline."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from fiddlex.schedules.placement import LayerPlacement
from fiddlex.simulate.clock import Costs


class MicrobatchTimes(NamedTuple):
    """Seconds of a microbatch on one device."""

    forward: float  # a layer's forward pass
    backward_input: float  # a layer's input-gradient pass, with what it recomputes
    backward_weight: float  # a layer's weight-gradient pass
    exchange: float  # communication in a layer that nothing hides; `forward` and `backward_input` include it
    embed: float  # the embedding, on which all ranks work together
    head: float  # the loss and its gradient, on which all ranks work together
    embed_backward: float  # the embedding's gradient, on which all ranks work together
    edge_exchange: float  # communication outside the layers; `embed`, `head` and `embed_backward` include it
    hops: tuple[float, ...]  # a message from each pipe rank to the next; the last: from the last rank to the first
    load: float = 0.0  # a layer's weights, from the host to the device, if they wait there
    store: float = 0.0  # a layer's gradients, to the host, if they wait there
    spill: float = 0.0  # what a layer's forward pass saves, to the host or back, if it waits there
    sharing: tuple[float, ...] = ()  # factor of slowdown while 1, 2, … ranks are active, as in `Costs`
    tick: float = 0.0  # every tick, in addition to its work, as in `Costs`

    @property
    def layer(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    @property
    def edges(self) -> float:
        return self.embed + self.head + self.embed_backward

    def costs(self, placement: LayerPlacement) -> Costs:
        layers, ranks = placement.layers_per_stage, placement.stage_ranks
        forward, inputs, weights = (
            tuple(each * time for each in layers) for time in (self.forward, self.backward_input, self.backward_weight)
        )
        edges = self.embed, self.head, self.embed_backward
        return Costs(
            forward,
            inputs,
            weights,
            self._hops(ranks),
            *edges,
            tick=self.tick,
            load=self.load,
            store=self.store,
            spill=placement.rows_per_chunk * self.spill,
            sharing=self.sharing,
        )

    def _hops(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """For each stage, the slower of its two messages: to the previous stage and to the next."""
        between = [self._hop(first, second) for first, second in itertools.pairwise(ranks)]
        return tuple(max(pair) for pair in zip([0.0, *between], [*between, 0.0], strict=True))

    def _hop(self, first: int, second: int) -> float:
        """Seconds of a message between two ranks.

        The first rank and the last are neighbours too. Between others, which only a user's schedule has, the message
        takes as long as between the slowest neighbours on its way; on a torus, where it shares several links, that is
        too little.
        """
        if first == second:
            return 0.0
        low, high = sorted((first, second))
        around = high - low > 1 and low == 0 and high == len(self.hops) - 1
        return self.hops[high] if around else max(self.hops[low:high])


class StepTimes(NamedTuple):
    """Seconds of a step outside the pipeline, on one device."""

    reduce: float  # the reduction of the gradients over `data`
    gather: float  # the gathering of the weights over `data`
    update: float  # the optimizer's update
