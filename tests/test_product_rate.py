"""The share of a step's time that its products would take by themselves."""

import math

import pytest

from experiments.benchmarks.products import made_product, products_of_step, table
from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.costs.sizes import model_flops

ONE_DEVICE = {"mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 1}


@pytest.mark.parametrize("changes", [{}, {"pipeline.num_microbatches": 4}, {"model.family": "llama"}])
def test_the_products_of_a_step_are_all_counted(changes: dict[str, object], tiny_config: Config) -> None:
    config = replaced(tiny_config, ONE_DEVICE | changes)
    counts = products_of_step(config)
    assert sum(2 * math.prod(shape) * number for shape, number in counts.items()) == pytest.approx(model_flops(config))


def test_the_table_sums_over_the_shapes() -> None:
    lines = list(
        table(
            {(1, 100, 10, 1000): 3, (2, 10, 10, 10): 1}, {None: 0.01, (1, 100, 10, 1000): 0.002, (2, 10, 10, 10): 0.001}
        )
    )
    assert lines[2:] == [
        "| 100 × 10 × 1,000 | 3 | 1 | 0.006 |",
        "| 2 of 10 × 10 × 10 | 1 | 0 | 0.001 |",
        "| all products | | 1 | 0.007 |",
        "| the step | | 1 | 0.010 |",
        "",
        "The step reaches 70% of the rate of its products.",
    ]


def test_a_batch_of_products_runs() -> None:
    assert made_product((2, 3, 4, 5), "float32")().shape == (2, 3, 5)
    assert made_product((1, 3, 4, 5), "bfloat16")().shape == (3, 5)
