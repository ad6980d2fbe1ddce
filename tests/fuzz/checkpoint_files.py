"""The reader of a checkpoint's description, `meta`. Files with arrays are damaged in tests/train/run."""

import contextlib
import functools
import json
import tempfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.file_digests import LIST
from fiddlex.train.step.state import SavedState
from tests.fuzz.reader import Reader

LAYERS = (2, 0, 1)


def _state(step: int) -> SavedState:
    rows = step * jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    return SavedState(jnp.int32(step), {"layers": {"kernel": rows}, "head": {"table": step + jnp.arange(4.0)}}, (), {})


@functools.cache
def _workdir() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """A workdir with checkpoints of steps 5 and 6, which is removed at the end, and the description of the newer."""
    folder = tempfile.TemporaryDirectory()
    with Checkpoints(Path(folder.name), keep_last=3) as checkpoints:
        for step in (5, 6):
            checkpoints.save(_state(step), step, layers=LAYERS, fingerprint="data")
            checkpoints.wait()
    newest = Path(folder.name) / "checkpoints" / "6"
    (newest / LIST).unlink()  # else it refuses every change before anything is read
    return folder, newest / "meta" / "metadata"


@functools.cache
def _whole() -> bytes:
    return _workdir()[1].read_bytes()


def _restored(data: bytes) -> SavedState:
    folder, file = _workdir()
    _whole()
    file.write_bytes(data)
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _state(0))
    with Checkpoints(Path(folder.name)) as checkpoints:
        state = checkpoints.restore_newest(abstract, layers=LAYERS, fingerprint="data")
    assert state is not None
    return state


def _described(data: bytes) -> str | None:
    with contextlib.suppress(ValueError, RecursionError):
        return json.dumps(json.loads(data), sort_keys=True)
    return None


def _meta(folder: Path, data: bytes) -> None:
    """The checkpoint is used if its description is what was saved, else the older one."""
    state = _restored(data)
    step = int(state.step)
    assert step == (6 if _described(data) == _described(_whole()) else 5)
    jax.tree.map(np.testing.assert_array_equal, state.weights, _state(step).weights)
    assert (state.scaling, state.switch) == ((), ())


def _written_meta(folder: Path, data: bytes) -> None:
    """A description with a right checksum that fiddlex did not write; that it gives layers other rows shows nowhere."""
    with contextlib.suppress(ValueError, RecursionError):
        described = json.loads(data)
        if isinstance(described, dict):
            described["checksum"] = zlib.crc32(json.dumps(described, sort_keys=True).encode())
            data = json.dumps(described).encode()
    _restored(data)


def _unsigned() -> list[bytes]:
    described = json.loads(_whole())
    del described["checksum"]
    return [json.dumps(described).encode()]


READERS = (
    Reader("checkpoint_meta", lambda: [_whole()], _meta, is_json=True, may_be_cut=True),
    Reader("checkpoint_meta_written", _unsigned, _written_meta, is_json=True, may_be_cut=True),
)
