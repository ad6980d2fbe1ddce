"""The exchange over tensor ranks in a layer, as far as no product runs beside it.

XLA runs an all-reduce, all-gather or reduce-scatter of a layer with nothing beside it, so that all of it is exposed. In
a ring of t ranks (`fiddlex.models.ring_products`), t pieces of a product and t − 1 hops take p + (t − 1)·max(p, h),
where a piece takes p and a hop h. So (t − 1)·max(0, h − p) of the exchange is exposed.

In I two rings of a column-parallel product share the links: in one the gradients of its input are summed, in the other
it gathers its input again, for the gradient of its kernel. They expose (t − 1)·max(0, 2h − p). W exchanges nothing.
"""

from collections.abc import Iterable
from typing import NamedTuple


class LayerExchange(NamedTuple):
    """Exposed seconds of a layer's exchange for one microbatch, by pass, without recomputation."""

    forward: float
    backward_input: float


class RingTimes(NamedTuple):
    """The times of one ring in a layer.

    Attributes:
      gathers: whether the ring of F gathers the input of its products, as in `RingWork`.
      forward: seconds of all pieces of its products in F.
      backward_input: seconds of all pieces of its products in I.
    """

    gathers: bool
    forward: float
    backward_input: float


def exchange_of_rings(rings: Iterable[RingTimes], *, ranks: int, hop: float) -> LayerExchange:
    """The exchange of a layer whose products run in rings.

    Args:
      rings: the rings of the layer.
      ranks: number of tensor ranks.
      hop: seconds of a hop.
    """
    forward = backward_input = 0.0
    for gathers, forward_s, backward_s in rings:
        forward += (ranks - 1) * max(0.0, hop - forward_s / ranks)
        backward_input += (ranks - 1) * max(0.0, (2 if gathers else 1) * hop - backward_s / ranks)
    return LayerExchange(forward, backward_input)
