"""How the stash holds what forward passes save for backward passes: `pipeline.stash_dtype`.

With `same` the stash holds every array as the forward pass made it. With another type it holds *activations* in 8 bits,
and each backward pass decodes them just before it uses them; the forward pass itself computes with full values (Jain et
al., "Gist", ISCA 2018, section 4.2, delayed precision reduction). The gradients are then no longer exact.

Activations are the arrays that a layer computes from its input in the type of this input, except for *statistics*.
Dropout masks, random keys, the layer's input itself and what follows from the batch alone stay as they are. Statistics
are what a fused kernel of attention saves of each row of the scores: a small error in them would be a large one in
every probability of the row. Our kernels mark them with the name `STATISTICS` (`jax.ad_checkpoint.checkpoint_name`);
those of other kernels are float32 where activations are not.

Each row of an array, along its last dimension, has one float32 scale. The scales of an array fill rows of `SCALE_ROW`,
so that a TPU does not pad them.
"""

SAME = "same"
STASH_DTYPES = (SAME, "float8_e4m3fn", "int8")
STATISTICS = "statistics"
SCALE_ROW = 128


def encoded_bytes(elements: int, width: int) -> int:
    """Bytes of an encoded array, scales included; `width` is the size of its last dimension."""
    scales = elements // width
    return elements + -(-scales // SCALE_ROW) * SCALE_ROW * 4
