"""A checkpoint whose description is damaged or cut short is passed over: the older one is used, and no wrong number."""

import contextlib
import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.errors import CheckpointError
from fiddlex.train.run.checkpoint import Checkpoints
from fiddlex.train.step.state import SavedState
from tests.fuzz.mutants import files
from tests.fuzz.test_readers import FULL

LAYERS = (2, 0, 1)


def a_state(step: int) -> SavedState:
    rows = step * jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    return SavedState(jnp.int32(step), {"layers": {"kernel": rows}, "head": {"table": step + jnp.arange(4.0)}}, (), {})


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (5, 6):
            checkpoints.save(a_state(step), step, layers=LAYERS, fingerprint="data")
            checkpoints.wait()
    return folder


@pytest.fixture(scope="module")
def whole(workdir: pathlib.Path) -> bytes:
    return meta_of(workdir).read_bytes()


def meta_of(workdir: pathlib.Path) -> pathlib.Path:
    return workdir / "checkpoints" / "6" / "meta" / "metadata"


def restored(workdir: pathlib.Path) -> SavedState:
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), a_state(0))
    with Checkpoints(workdir) as checkpoints:
        state = checkpoints.restore_newest(abstract, layers=LAYERS, fingerprint="data")
    assert state is not None
    return state


def restored_step(workdir: pathlib.Path) -> int:
    """The step whose checkpoint is used; its numbers are those that were saved."""
    state = restored(workdir)
    step = int(state.step)
    jax.tree.map(np.testing.assert_array_equal, state.weights, a_state(step).weights)
    assert (state.scaling, state.switch) == ((), ())
    return step


def test_a_description_that_is_cut_short(workdir: pathlib.Path, whole: bytes) -> None:
    assert restored_step(workdir) == 6
    for length in range(0, len(whole.rstrip()), 1 if FULL else 40):
        meta_of(workdir).write_bytes(whole[:length])
        assert restored_step(workdir) == 5, length
    meta_of(workdir).write_bytes(whole)
    assert restored_step(workdir) == 6


def test_a_description_that_is_damaged(workdir: pathlib.Path, whole: bytes) -> None:
    @settings(max_examples=300 if FULL else 15)
    @given(files([whole], is_json=True))
    def run(data: bytes) -> None:
        meta_of(workdir).write_bytes(data)
        assert restored_step(workdir) in (5, 6)

    try:
        run()
    finally:
        meta_of(workdir).write_bytes(whole)


def test_a_description_with_a_right_checksum_that_fiddlex_did_not_write(workdir: pathlib.Path, whole: bytes) -> None:
    """It may give other rows to layers, which nothing reveals; it may not end the program in another way."""
    meta = json.loads(whole)
    del meta["checksum"]

    @settings(max_examples=300 if FULL else 15)
    @given(files([json.dumps(meta).encode()], is_json=True))
    def run(data: bytes) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            described = json.loads(data)
            if isinstance(described, dict):
                described["checksum"] = zlib.crc32(json.dumps(described, sort_keys=True).encode())
                data = json.dumps(described).encode()
        meta_of(workdir).write_bytes(data)
        with contextlib.suppress(CheckpointError):
            restored(workdir)

    try:
        run()
    finally:
        meta_of(workdir).write_bytes(whole)
