"""The exchange over tensor ranks in a layer, as far as no product runs beside it.

XLA runs an all-reduce, all-gather or reduce-scatter of a layer with nothing beside it, so that all of it is exposed. In
a ring of t ranks (`fiddlex.models.rings`), t pieces of a product and t − 1 hops take p + (t − 1)·max(p, h), where a
piece takes p and a hop h. So (t − 1)·max(0, h − p) of the exchange is exposed. In I two rings of a column-parallel
product share the links: in one the gradients of its input are summed, in the other it gathers its input again, for the
gradient of its kernel. They expose (t − 1)·max(0, 2h − p).

In K blocks (`fiddlex.models.blocks`), of which each takes p to multiply and e to gather or to sum, the first gather or
the last sum runs beside no product, and each other runs beside one: e + (K − 1)·max(0, e − p) is exposed. In I one
all-gather of g seconds brings the input of a column-parallel product again while its products run; with the sums these
expose e + max(0, g + (K − 1)·e − K·p). W exchanges nothing.
"""

from collections.abc import Iterable
from typing import NamedTuple


class LayerExchange(NamedTuple):
    """Exposed seconds of a layer's exchange for one microbatch, by pass, without recomputation."""

    forward: float
    backward_input: float


class ProductTimes(NamedTuple):
    """The times of the products beside which one exchange of a layer runs."""

    gathers: bool  # whether the exchange of F gathers the input of the products, as in `ExchangedWork`
    forward: float  # seconds of all pieces of its products in F
    backward_input: float  # seconds of all pieces of its products in I


def exchange_of_rings(products: Iterable[ProductTimes], *, ranks: int, hop: float) -> LayerExchange:
    """The exchange of a layer whose products run in rings of `ranks` devices; a hop takes `hop` seconds."""
    forward = backward_input = 0.0
    for gathers, forward_s, backward_s in products:
        forward += (ranks - 1) * max(0.0, hop - forward_s / ranks)
        backward_input += (ranks - 1) * max(0.0, (2 if gathers else 1) * hop - backward_s / ranks)
    return LayerExchange(forward, backward_input)


def exchange_of_blocks(products: Iterable[ProductTimes], *, number: int, block: float, whole: float) -> LayerExchange:
    """The exchange in `number` blocks: one is gathered or summed in `block` seconds, all are gathered in `whole`."""
    forward = backward_input = 0.0
    others = number - 1
    for gathers, forward_s, backward_s in products:
        forward += block + others * max(0.0, block - forward_s / number)
        if gathers:
            backward_input += block + max(0.0, whole + others * block - backward_s)
        else:
            backward_input += block + others * max(0.0, block - backward_s / number)
    return LayerExchange(forward, backward_input)
