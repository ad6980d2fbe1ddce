"""Which layers each stage has, and which rows of the arrays that stack the weights by layer belong to them.

A stacked array is sharded over `pipe` along its first dimension, so its rows are ordered by rank, then chunk, then
layer within the stage, and every chunk of every rank has as many rows as the largest stage has layers. Rows that no
layer fills are padding: zero weights, zero gradients, never run. Invariant: a row belongs to one layer or to none, and
each layer has one row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from fiddlex.config.values.stages import BALANCED, parse_layers_per_stage
from fiddlex.errors import ConfigError
from fiddlex.terminal.readable import counted

PADDING = -1


@dataclasses.dataclass(frozen=True)
class LayerPlacement:
    """The layers of each stage and the rank of each stage."""

    stage_ranks: tuple[int, ...]  # as in `Schedule.placement`
    layers_per_stage: tuple[int, ...]  # at least one each

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_stage)

    @property
    def num_ranks(self) -> int:
        return 1 + max(self.stage_ranks)

    @functools.cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in order."""
        return tuple(
            tuple(stage for stage, home in enumerate(self.stage_ranks) if home == rank)
            for rank in range(self.num_ranks)
        )

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(map(len, self.chunks))

    @property
    def most_layers_of_rank(self) -> int:
        return max(sum(self.layers_per_stage[stage] for stage in stages) for stages in self.chunks)

    @property
    def rows_per_chunk(self) -> int:
        return max(self.layers_per_stage)

    @property
    def rows_per_rank(self) -> int:
        """Number of rows of a stacked array on each rank."""
        return self.rows_per_chunk * self.num_chunks

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        """The layer of each row, or `PADDING`."""
        rows = []
        for stages in self.chunks:
            for chunk in range(self.num_chunks):
                own = range(0)
                if chunk < len(stages):
                    first = sum(self.layers_per_stage[: stages[chunk]])
                    own = range(first, first + self.layers_per_stage[stages[chunk]])
                rows += [*own, *[PADDING] * (self.rows_per_chunk - len(own))]
        return tuple(rows)

    @functools.cached_property
    def stages(self) -> tuple[int, ...]:
        """The stage of each row; any stage for the rows of a chunk that its rank does not have."""
        own = (stages + (0,) * (self.num_chunks - len(stages)) for stages in self.chunks)
        return tuple(stage for stages in own for stage in stages for _ in range(self.rows_per_chunk))

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The row of each layer."""
        of_layer = {layer: row for row, layer in enumerate(self.layers) if layer != PADDING}
        return tuple(of_layer[layer] for layer in range(self.num_layers))

    def first_layers(self) -> list[list[int]]:
        """The first layer of each chunk, [rank][chunk]; 0 where a rank has no such chunk."""
        return self._by_chunk(lambda stage: sum(self.layers_per_stage[:stage]))

    def chunk_sizes(self) -> list[list[int]]:
        """The number of layers of each chunk, [rank][chunk]; 0 where a rank has no such chunk."""
        return self._by_chunk(lambda stage: self.layers_per_stage[stage])

    def _by_chunk(self, value: Callable[[int], int]) -> list[list[int]]:
        return [[value(stage) for stage in stages] + [0] * (self.num_chunks - len(stages)) for stages in self.chunks]


def place_layers(stage_ranks: Sequence[int], num_layers: int, layers_per_stage: str = "") -> LayerPlacement:
    """Cuts the layers into stages as `layers_per_stage` says, as in `3,2,3`; empty: evenly, the larger stages first.

    `balanced` is refused here, since `fiddlex.planner.settle` replaces it by numbers.
    """
    num_stages = len(stage_ranks)
    if not layers_per_stage:
        if num_layers < num_stages:
            raise ConfigError(
                f"model.num_layers={num_layers} is less than the {num_stages} stages of the schedule: each stage needs "
                "a layer. Take more layers, or a schedule with fewer stages."
            )
        least, larger = divmod(num_layers, num_stages)
        return LayerPlacement(tuple(stage_ranks), tuple(least + (stage < larger) for stage in range(num_stages)))
    if layers_per_stage == BALANCED:
        raise ConfigError(
            f"pipeline.layers_per_stage={BALANCED}: the costs of the model decide, and were not asked. Use the config "
            "that fiddlex.planner.settle.settle returns for this one, or give the numbers."
        )
    counts = parse_layers_per_stage(layers_per_stage)
    if len(counts) != num_stages or sum(counts) != num_layers:
        raise ConfigError(
            f"pipeline.layers_per_stage={layers_per_stage!r} has {counted(len(counts), 'stage')} and "
            f"{counted(sum(counts), 'layer')}; the schedule has {counted(num_stages, 'stage')}, and "
            f"model.num_layers={num_layers}. Give one number for each stage, in order, which add up to the layers; "
            f"leave it empty for even stages, or take {BALANCED} for the fastest."
        )
    return LayerPlacement(tuple(stage_ranks), counts)
