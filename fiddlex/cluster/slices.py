"""The slices of TPUs that can be had, by their number of chips.

On a torus of two dimensions (v5e, v6e) they are powers of two; on one of three (v4, v5p) parts of a cube of 4 × 4 × 4
chips, or whole cubes in any arrangement: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e. (libtpu describes many
others.)
"""

import math

_PARTS_OF_A_CUBE = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}


def slice_shape(dimensions: int, num_chips: int) -> tuple[int, ...]:
    """The most cubic slice, whose edges have the smallest sum.

    Args:
      dimensions: of the torus: 2 or 3.
      num_chips: of the slice, at least 1; how many there can be at most depends on the kind of TPU.

    Returns:
      Its edges, as Cloud TPU and libtpu order them; empty where no slice has so many chips.
    """
    if dimensions == 2:
        if num_chips == 2 or num_chips.bit_count() != 1:
            return ()
        narrow = 2 ** ((num_chips.bit_length() - 1) // 2)
        return narrow, num_chips // narrow
    if num_chips < 64 or num_chips % 64:
        return _PARTS_OF_A_CUBE.get(num_chips, ())
    cubes = num_chips // 64
    shapes = [
        (a, b, cubes // (a * b))
        for a in range(1, math.isqrt(cubes) + 1)
        for b in range(a, math.isqrt(cubes // a) + 1)
        if cubes % (a * b) == 0
    ]
    return tuple(4 * edge for edge in min(shapes, key=sum))
