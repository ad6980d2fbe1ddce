"""The slices of TPUs that Google Cloud offers, by their number of chips.

On a torus of two dimensions (v5e, v6e) the number of chips of a slice is a power of two, except for 2. On a torus of
three dimensions (v4, v5p, TPU7x) a slice is a part of a cube of 4 × 4 × 4 chips, or whole cubes in any arrangement.
Source: docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x. (libtpu describes many other slices.)
"""

import dataclasses
import math

from fiddlex.config import rules

_PARTS_OF_A_CUBE = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}


def slice_shape(dimensions: int, num_chips: int) -> tuple[int, ...]:
    """The edges of the most cubic slice of `num_chips` chips; empty where no slice has so many.

    It is the slice whose edges have the smallest sum. Edges are in the order of Cloud TPU and libtpu. The torus has 2
    or 3 `dimensions`. The caller checks the TPU's upper limit.
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


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a slice: virtual machines, each with some of its chips; `[hosts]` of a topology file."""

    devices: int  # number of chips of each host where the slice has several hosts
    alone: int  # number of chips of the largest slice that is one host
    accelerator: str  # GKE's name for the chips, the value of the node label `cloud.google.com/gke-tpu-accelerator`
    source: str  # of the figures and the name

    def validate(self, prefix: str) -> None:
        rules.at_least(f"{prefix}devices", self.devices, 1)
        rules.at_least(f"{prefix}alone", self.alone, self.devices)
