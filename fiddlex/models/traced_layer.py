"""The description of a layer whose code was traced, in place of one that is written operation by operation."""

import dataclasses
from typing import NamedTuple

from fiddlex.config.values.recompute import FULL
from fiddlex.models.device_arrays import DeviceArrays, Saved
from fiddlex.models.spec import InnerProduct, Operation, Product


class PerSequence(NamedTuple):
    """A size that grows with the number of sequences in a microbatch."""

    fixed: int
    each: int  # of a sequence

    def of(self, arrays: DeviceArrays) -> int:
        return self.fixed + self.each * arrays.num_sequences


class TracedArray(NamedTuple):
    """An array that a traced layer saves."""

    elements: PerSequence
    width: int
    itemsize: int
    is_encoded: bool  # where the stash encodes activations


@dataclasses.dataclass(frozen=True)
class Traced(Operation):
    """A whole layer, counted in a trace of its code, with sizes on one of as many tensor ranks as the config has."""

    with_weights: tuple[Product, ...]
    without_weights: tuple[InnerProduct, ...]
    moves: PerSequence  # elements that its elementwise work reads and writes
    holds: PerSequence  # elements
    saves: tuple[TracedArray, ...]
    remakes: PerSequence  # bytes that a backward pass makes of what is saved, if no product fuses with elementwise work
    leaves: PerSequence  # bytes, for W
    leaves_again: PerSequence  # bytes, where the backward pass runs the whole layer again
    exchanges: tuple[float, float]  # of F and of I, as `sums`

    @property
    def products(self) -> tuple[Product, ...]:
        return self.with_weights

    @property
    def inner(self) -> tuple[InnerProduct, ...]:
        return self.without_weights

    @property
    def sums(self) -> tuple[float, float]:
        return self.exchanges

    def moved(self, arrays: DeviceArrays) -> int:
        return self.moves.of(arrays)

    def held(self, arrays: DeviceArrays) -> int:
        return self.holds.of(arrays)

    def remade(self, arrays: DeviceArrays) -> int:
        return self.remakes.of(arrays)

    def saved(self, arrays: DeviceArrays, before: Operation) -> list[Saved]:
        return [Saved(x.elements.of(arrays), x.width, x.itemsize, is_input=not x.is_encoded) for x in self.saves]

    def left(self, arrays: DeviceArrays) -> int:
        return (self.leaves_again if FULL in arrays.recompute else self.leaves).of(arrays)
