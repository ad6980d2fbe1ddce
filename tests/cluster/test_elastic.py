"""A run that goes on with fewer processes keeps its global batch, and the rest of its mesh."""

import hypothesis
import pytest
from hypothesis import strategies as st

from fiddlex.cluster.elastic import shrunk, sizes
from fiddlex.config import Config
from fiddlex.errors import ConfigError


def made(data: int, pipe: int, microbatches: int, batch: int) -> Config:
    config = Config()
    config.mesh.data, config.mesh.pipe = data, pipe
    config.pipeline.num_microbatches, config.data.global_batch_size = microbatches, batch
    return config


@hypothesis.given(
    st.integers(1, 8), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 4), st.integers(2, 16)
)
def test_a_smaller_run_has_the_same_batches(data: int, pipe: int, rounds: int, examples: int, number: int) -> None:
    microbatches = rounds * pipe
    config = made(data, pipe, microbatches, data * microbatches * examples)
    for size in sizes(config, number):
        smaller = shrunk(config, number, size)
        assert smaller.data == config.data
        assert (smaller.mesh.pipe, smaller.mesh.tensor) == (pipe, 1)
        assert smaller.mesh.data * number == data * size  # as many devices in each process as before
        assert smaller.microbatch_size <= config.microbatch_size
        if data % smaller.mesh.data == 0:
            assert smaller.microbatch_size == config.microbatch_size


def test_sizes_and_microbatches() -> None:
    config = made(4, 1, 2, 32)
    assert sizes(config, 4) == [2, 1]  # three replicas do not divide 32
    assert shrunk(config, 4, 2).pipeline.num_microbatches == 4
    assert shrunk(config, 4, 4) is config
    assert sizes(made(4, 1, 1, 24), 4) == [3, 2, 1]
    assert shrunk(made(4, 1, 1, 24), 4, 3).pipeline.num_microbatches == 2
    assert sizes(made(2, 4, 4, 32), 8) == [4]  # a replica takes four processes
    assert sizes(made(1, 4, 4, 32), 4) == []


@pytest.mark.parametrize(
    ("size", "message"),
    [(1, "cannot shrink to 1 of them: these have no whole number"), (3, "=32 does not divide by mesh.data=3")],
)
def test_what_does_not_fit(size: int, message: str) -> None:
    config = made(1, 1, 1, 32) if size == 1 else made(4, 1, 1, 32)
    with pytest.raises(ConfigError, match=message):
        shrunk(config, 4, size)
