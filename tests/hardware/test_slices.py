import itertools
import math

import pytest

from fiddlex.hardware.slices import slice_shape


def test_slices_of_two_dimensions():
    shapes = {n: "x".join(map(str, shape)) for n in range(1, 257) if (shape := slice_shape(2, n))}
    known = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
    assert shapes == known  # docs.cloud.google.com/tpu/docs/v5e and v6e


@pytest.mark.parametrize(
    "shape",
    ["2x2x1", "2x2x2", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16", "16x16x24"],
)
def test_slices_of_three_dimensions(shape):
    edges = tuple(map(int, shape.split("x")))  # docs.cloud.google.com/tpu/docs/v5p
    assert slice_shape(3, math.prod(edges)) == edges


def test_of_three_dimensions_none_is_more_cubic():
    most = {}  # the smallest sum of edges by cubes
    for shape in itertools.combinations_with_replacement(range(1, 97), 3):
        cubes = math.prod(shape)
        if cubes <= 96:
            most[cubes] = min(most.get(cubes, sum(shape)), sum(shape))
    for num_chips in range(33, 6145):
        edges = slice_shape(3, num_chips)
        if num_chips % 64:
            assert not edges
        else:
            assert math.prod(edges) == num_chips
            assert all(edge % 4 == 0 for edge in edges)
            assert sum(edges) == 4 * most[num_chips // 64]
            assert edges == tuple(sorted(edges))
