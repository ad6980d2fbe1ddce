"""Saves from a copy on the devices, which devices of the CPU do not make by themselves."""

import errno
import logging
import os
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, MeshConfig
from fiddlex.errors import CheckpointError
from fiddlex.train import loop
from fiddlex.train.run.checkpoints import save_interval, snapshot
from fiddlex.train.run.checkpoints import writer as checkpoint_writer
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.step.state import SavedState
from tests.train.run.checkpoints.test_checkpoint import LAYERS, a_state, restored

GB = 10**9


@pytest.fixture(autouse=True)
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "has_room", lambda tree: True)


def save(checkpoints: Checkpoints, state: SavedState, step: int = 5) -> None:
    checkpoints.save(state, step, layers=LAYERS, fingerprint="data")


def test_the_training_goes_on_before_anything_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    make_meta = checkpoint_writer.make_meta

    def late(*arguments: Any) -> Any:
        assert goes_on.wait(60)
        return make_meta(*arguments)

    monkeypatch.setattr(checkpoint_writer, "make_meta", late)
    step = jax.jit(lambda weights: jax.tree.map(lambda x: x + 1, weights), donate_argnums=0)
    state = a_state()
    before = jax.tree.map(np.array, state.weights)
    with Checkpoints(tmp_path) as checkpoints:
        try:
            save(checkpoints, state)
            assert checkpoints.is_writing()
            assert checkpoints.steps() == []
            jax.block_until_ready(step(state.weights))
            assert all(x.is_deleted() for x in jax.tree.leaves(state.weights))
        finally:
            goes_on.set()
        checkpoints.wait()
        assert not checkpoints.is_writing()
    read = restored(tmp_path)
    assert read is not None
    jax.tree.map(np.testing.assert_array_equal, read.weights, before)


def test_where_a_save_is_waited_for_no_device_needs_room(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "copied", lambda tree: pytest.fail("copied on the devices"))
    with Checkpoints(tmp_path, waits=True) as checkpoints:
        save(checkpoints, a_state())
    assert checkpoints.steps() == [5]


def test_a_copy_has_memory_of_its_own_and_the_same_sharding() -> None:
    mesh = make_mesh(MeshConfig(data=2))
    sharding = jax.NamedSharding(mesh, jax.P(None, "data"))
    x = jax.device_put(jnp.arange(8.0).reshape(2, 4), sharding)
    (copy,) = snapshot.copied((x,))
    assert copy.sharding.is_equivalent_to(sharding, 2)
    parts = zip(copy.addressable_shards, x.addressable_shards, strict=True)
    assert all(one.data.unsafe_buffer_pointer() != other.data.unsafe_buffer_pointer() for one, other in parts)
    np.testing.assert_array_equal(copy, x)


@pytest.mark.parametrize("finish", ["save", "wait", "close"])
def test_an_error_of_the_thread_is_raised_by_the_next_use(
    finish: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError("No space left on device")

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_writer, "make_meta", full)
        save(checkpoints, a_state())
        with pytest.raises(CheckpointError, match=r"Cannot write a checkpoint .*No space left on device.*make room"):
            save(checkpoints, a_state(), 6) if finish == "save" else getattr(checkpoints, finish)()
    save(checkpoints, a_state(), 7)  # there is room again
    checkpoints.close()
    assert checkpoints.steps() == [7]


@pytest.mark.parametrize(
    ("every", "failures"),
    [
        (2, 2),
        ("auto", 1),
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param("auto", 2, marks=pytest.mark.long),
    ],
)
def test_a_save_that_fails_in_the_background_is_tried_once_more(
    every: int | str,
    failures: int,
    tiny_config: Config,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The saves that fail are the first ones; then there is room again."""
    monkeypatch.setattr(logging.getLogger("fiddlex"), "propagate", True)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(save_interval, "FIRST_STEPS", 2)
    monkeypatch.setattr(checkpoint_writer, "has_room", snapshot.has_room)
    record_all, saves = checkpoint_writer.record_all, []

    def full(directory: pathlib.Path, step: int) -> None:
        saves.append(step)
        if len(saves) <= failures:
            raise OSError("No space left on device")
        record_all(directory, step)

    monkeypatch.setattr(checkpoint_writer, "record_all", full)
    tiny_config.train.num_steps, tiny_config.train.checkpoint_every = 12, every
    if failures == 2:
        with pytest.raises(CheckpointError, match="No space left on device"):
            loop.train(tiny_config, tmp_path)
        assert Checkpoints(tmp_path).steps() == []
    else:
        assert loop.train(tiny_config, tmp_path).step == 12
        assert Checkpoints(tmp_path).steps()[-1] == 12
    told = "\n".join(caplog.messages)
    assert "No space left on device. Earlier checkpoints are intact" in told
    assert f"The run tries it once more, with step {saves[1]}." in told
    assert "is on disk after" not in told.partition("once more")[0]


def test_a_damaged_checkpoint_is_moved_to_another_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_another_disk(source: object, target: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, a_state())
        checkpoints.wait()
        monkeypatch.setattr(os, "rename", on_another_disk)
        checkpoints.set_aside([5])
        assert checkpoints.steps() == []
    (moved,) = (tmp_path / "damaged_checkpoints").iterdir()
    assert (moved / "SHA256SUMS").is_file()


@pytest.mark.parametrize(
    ("limit", "peak", "room"), [(100, 80, True), (100, 86, False), (20, 10, False), (None, None, False)]
)
def test_a_copy_on_the_devices_takes_room_on_each(
    limit: int | None, peak: int | None, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second device has as much memory as the parameters say, of which 5% are left free; the first has plenty."""
    first, second = devices = jax.devices()[:2]

    def stats(device: jax.Device) -> dict[str, int] | None:
        if limit is None or peak is None:
            return {} if device == first else {"bytes_limit": GB}  # what some devices tell
        return (
            {"bytes_limit": 10**12, "peak_bytes_in_use": 0}
            if device == first
            else {
                "bytes_limit": limit * GB,
                "peak_bytes_in_use": peak * GB,
            }
        )

    monkeypatch.setattr(snapshot, "memory_stats", stats)
    mesh = jax.make_mesh((2,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.ShapeDtypeStruct((2, 5, GB // 2), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
    assert second in whole.sharding.addressable_devices
    assert snapshot.has_room({"x": whole}) == room  # 10 GB of each device
