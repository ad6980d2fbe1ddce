"""An activation that a layer saves for its backward pass, and the memory that it takes in the stash."""

from typing import NamedTuple

from fiddlex.config.values.stash import encoded_bytes


class Saved(NamedTuple):
    """An activation that a forward pass saves."""

    elements: int
    width: int  # size of the last dimension
    itemsize: int  # bytes of an element, unless it is encoded
    of_product: bool = False  # whether it is the input of a product
    is_input: bool = False  # whether it is the layer's input, which is never encoded

    @property
    def bytes(self) -> int:
        """Bytes of the array as the forward pass makes it."""
        return self.elements * self.itemsize

    @property
    def encoded(self) -> int:
        """Bytes of the array in a stash whose activations are encoded (`fiddlex.config.values.stash`)."""
        return self.bytes if self.is_input else encoded_bytes(self.elements, self.width)
