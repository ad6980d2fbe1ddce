"""Examples of several sources: blended by weight to train on, and each once to evaluate on."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fiddlex.data.examples import ExampleSource
from fiddlex.data.megatron.blend import Blend, interleaved
from fiddlex.data.staged_examples import checked


class BlendedExamples:
    """Sources to train on, and their weights (`Blend`).

    A blend has no epochs; each of its sources has. The loader takes each example of a source once before it takes any
    of them again, in an order that is drawn anew for each epoch of the source. At every step the sources have given as
    many examples as their weights ask for, to within the number of sources.
    """

    def __init__(self, sources: Sequence[ExampleSource], weights: Sequence[Fraction]):
        self.sources = tuple(sources)
        self.blend = Blend(weights)  # the order in which the sources give examples


class InterleavedExamples:
    """All examples of several sources, each once. Any first part of them has a share of every source."""

    def __init__(self, sources: Sequence[ExampleSource]):
        self._sources = sources
        self._places = interleaved([len(source) for source in sources])

    def __len__(self) -> int:
        return len(self._places)

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        source, number = self._places[checked(index, len(self))].tolist()
        return self._sources[source].example(number, epoch=epoch)
