"""The arrays of a microbatch on one device, from which each operation of a layer says what it reads, writes and saves.

The letters are those of `fiddlex.models.layers`: B sequences of a microbatch, S positions, T a tensor rank's part of
the positions under sequence parallelism (else S), H hidden size, N this tensor rank's heads.
"""

import dataclasses
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.config.values.stash import encoded_bytes
from fiddlex.models.task_sizes import task_of

FLOAT32, WORD = 4, 4  # bytes of an element; words are those of the random generator
ITEMSIZES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}
MASK_ROW = 128  # bytes of a row of a saved mask (`fiddlex.models.dropout`)


class Saved(NamedTuple):
    """An activation that a forward pass saves for its backward pass."""

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


@dataclasses.dataclass(frozen=True)
class DeviceArrays:
    """Sizes of a microbatch's arrays on one device, in elements unless a line says bytes."""

    num_sequences: int  # B
    seq_len: int  # S
    hidden: int  # width of the residual stream, H
    tensor: int  # number of tensor ranks
    split: int  # number of ranks among which the residual stream is split
    # parts of the sequence, of which a column-parallel product saves only the rank's own; 1: it saves the whole
    parts: int
    itemsize: int  # bytes of an element in the compute dtype
    operand: int  # bytes of an element of an array that only products read
    dropout: bool
    recompute: frozenset[str]  # the parts that the backward pass makes again (`PipelineConfig.recomputed`)
    # whether attention reads and gives arrays of all heads on this rank in the compute dtype, as splash does; else one
    # head after another, and products alone read them
    joins_heads: bool

    @classmethod
    def of(
        cls, config: Config, hidden: int, *, rounds_products: bool = False, joins_heads: bool = False
    ) -> "DeviceArrays":
        """The arrays of a config, of a network with a residual stream of width `hidden`.

        With `rounds_products`, products read their operands in two bytes for each element at most.
        """
        tensor, itemsize = config.mesh.tensor, ITEMSIZES[config.model.dtype]
        return cls(
            num_sequences=num_sequences(config),
            seq_len=config.model.seq_len,
            hidden=hidden,
            tensor=tensor,
            split=tensor if config.mesh.sequence_parallel else 1,
            parts=tensor if config.mesh.collective_matmul else 1,
            itemsize=itemsize,
            operand=min(itemsize, 2) if rounds_products else itemsize,
            dropout=config.model.dropout > 0,
            recompute=config.pipeline.recomputed,
            joins_heads=joins_heads,
        )

    @property
    def tokens(self) -> int:
        """Positions of a microbatch, B·S."""
        return self.num_sequences * self.seq_len

    @property
    def residual(self) -> int:
        """The residual stream on a device, B·T·H."""
        return self.tokens * self.hidden // self.split

    def local(self, width: int) -> int:
        """An array whose last dimension, of size `width`, tensor parallelism shards."""
        return self.tokens * (width // self.tensor)

    def of_heads(self, elements: int, width: int, head_size: int, *, of_product: bool = False) -> Saved:
        """An array that attention reads or gives, of heads whose joint width on all ranks is `width`."""
        if self.joins_heads:
            return Saved(elements, width // self.tensor, self.itemsize, of_product)
        return Saved(elements, head_size, self.operand, of_product)

    def mask(self, elements: int) -> int:
        """Bytes of the saved mask of a dropout of so many elements, a bit for each (`fiddlex.models.dropout`)."""
        rows = -(-elements // (8 * MASK_ROW))
        return rows * MASK_ROW * (self.dropout and "masks" not in self.recompute)


def num_scored(config: Config) -> int:
    """Positions of a microbatch that a device scores."""
    return num_sequences(config) * task_of(config).num_scored


def num_sequences(config: Config) -> int:
    """Sequences in a microbatch, B."""
    return config.microbatch_size * task_of(config).num_sequences
