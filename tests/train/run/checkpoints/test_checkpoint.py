"""Checkpoints of small arrays: what is noticed when they are read, and rows that change places."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.errors import CheckpointError
from fiddlex.schedules.placement import PADDING
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.checksums import text_checksum
from fiddlex.train.run.checkpoints.file_digests import LIST
from fiddlex.train.step.scaling import Scaling
from fiddlex.train.step.spikes import Usual
from fiddlex.train.step.state import SavedState

LAYERS = (2, 0, 1)
# What a run has in float16, with spikes, and where it decides about its semantics.
SCALING, USUAL = Scaling(np.float32([1024, 512]), np.int32(3)), Usual(np.float32(2.5), np.float32(1.5), np.int32(7))
SWITCH = {"phases": [["sync", 0, 9]], "losses": [2.5], "means": [], "bad": 0}


def a_state(layers: Sequence[int] = LAYERS) -> SavedState:
    """Weights of which layer n has 10·n and 10·n + 1, and a table."""
    rows = jnp.asarray([[0.0, 0.0] if layer == PADDING else [10.0 * layer, 10.0 * layer + 1] for layer in layers])
    return SavedState(jnp.int32(0), {"layers": {"kernel": rows}, "head": {"table": jnp.arange(4.0)}}, (), {})


def restored(workdir: pathlib.Path, layers: Sequence[int] = LAYERS) -> SavedState | None:
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), a_state(layers))
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.restore_newest(abstract, layers=layers)


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
    state = a_state()._replace(scaling=SCALING, usual=USUAL, switch=SWITCH)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 5, layers=LAYERS, fingerprint="data")
    return tmp_path


@pytest.mark.parametrize("layers", [LAYERS, (0, PADDING, 1, 2)], ids=["same rows", "other rows"])
def test_each_layer_has_its_weights_in_whatever_row(layers: Sequence[int], workdir: pathlib.Path) -> None:
    state = restored(workdir, layers)
    assert state is not None
    assert int(state.step) == 5
    jax.tree.map(np.testing.assert_array_equal, state.weights, a_state(layers).weights)
    chex.assert_trees_all_equal((state.scaling, state.usual), (SCALING, USUAL))
    assert state.switch == SWITCH


def test_what_a_killed_process_left_is_removed_before_the_first_save(
    workdir: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, elsewhere = workdir / "checkpoints", workdir / "elsewhere"
    elsewhere.mkdir()
    for name in ("4.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp", "notes"):
        (folder / name).mkdir()
        (folder / name / "part").write_text("x")
    (folder / "7.orbax-checkpoint-tmp").symlink_to(elsewhere)
    with caplog.at_level("INFO"):
        assert restored(workdir) is not None
        assert len(list(folder.glob("*tmp"))) == 3  # who only reads removes nothing
        with Checkpoints(workdir) as checkpoints:
            for step in (6, 8):
                checkpoints.save(a_state(), step, layers=LAYERS, fingerprint="data")
    assert sorted(path.name for path in folder.iterdir()) == ["6", "8", "notes"]
    assert elsewhere.is_dir()
    assert [message for message in caplog.messages if "Removed" in message] == [
        f"Removed the unfinished checkpoints of interrupted saves in {folder}: 4.orbax-checkpoint-tmp, "
        "6.orbax-checkpoint-tmp, 7.orbax-checkpoint-tmp."
    ]
    assert all(record.levelname == "INFO" for record in caplog.records)  # orbax finds nothing to warn of


def test_when_none_can_be_read_each_is_told_once_and_stays(
    workdir: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (workdir / "checkpoints" / "5" / "meta" / "metadata").unlink()
    with Checkpoints(workdir) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.restore_newest(a_state(), layers=LAYERS, move_damaged=True)
    assert str(error.value).count("/checkpoints/5: meta/metadata: it is missing") == 1
    assert caplog.messages == []
    assert (workdir / "checkpoints" / "5").is_dir()


def other_numbers(meta: dict[str, Any]) -> None:
    """As if the array had changed: the description is whole, and the array is not what it describes."""
    meta["checksums"]["weights.layers.kernel"] += 1
    meta["checksum"] = text_checksum({name: value for name, value in meta.items() if name != "checksum"})


def odd_description(meta: dict[str, Any]) -> None:
    """As from a hostile source: with a right checksum."""
    meta["fingerprint"] = "x" * 5000
    meta["checksum"] = text_checksum({name: value for name, value in meta.items() if name != "checksum"})


def other_description(meta: dict[str, Any]) -> None:
    meta["layers"] = [0, 1, 2]


def no_description(meta: dict[str, Any]) -> str:
    return "\ud800" * 5000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_numbers, r"weights\.layers\.kernel is not what was saved"),
        (odd_description, r"its fingerprint is not one that fiddlex writes: 'x"),
        (other_description, "what it says of itself is not what was saved"),
        (no_description, r"what it says of itself is not what was saved: '\\ud800"),
    ],
)
def test_what_is_not_what_was_saved_is_not_read(
    change: Callable[[dict[str, Any]], str | None], message: str, workdir: pathlib.Path
) -> None:
    path = workdir / "checkpoints" / "5" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(change(meta) or meta))
    (workdir / "checkpoints" / "5" / LIST).unlink()  # as in checkpoints of earlier versions
    with pytest.raises(CheckpointError, match=message) as error:
        restored(workdir)
    assert len(str(error.value)) < 1000


def other_shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + 2), x.dtype, sharding=x.sharding)


@pytest.mark.parametrize("part", ["layers", "head"])
def test_a_network_of_other_sizes_is_refused_and_nothing_is_moved_aside(part: str, workdir: pathlib.Path) -> None:
    """Orbax would fill the array up with zeros, or cut it."""
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), a_state())
    weights = abstract.weights | {part: jax.tree.map(other_shape, abstract.weights[part])}
    with Checkpoints(workdir) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.restore_newest(abstract._replace(weights=weights), layers=LAYERS, move_damaged=True)
    assert "made with another network" in str(error.value)
    name, was, now = ("layers.kernel", (3, 2), (3, 4)) if part == "layers" else ("head.table", (4,), (6,))
    assert f"weights.{name} is {now}, was {was}" in str(error.value)
    assert (workdir / "checkpoints" / "5").is_dir()


def test_padding_of_the_vocabulary_alone_may_differ(workdir: pathlib.Path) -> None:
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), a_state())
    weights = abstract.weights | {"head": jax.tree.map(other_shape, abstract.weights["head"])}
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(a_state(), 6, layers=LAYERS, fingerprint="data", padded_vocab=4)
        checkpoints.wait()
        state = checkpoints.restore_newest(abstract._replace(weights=weights), layers=LAYERS, padded_vocab=6)
    assert state is not None
    np.testing.assert_array_equal(state.weights["head"]["table"], [0, 1, 2, 3, 0, 0])


def test_a_network_with_other_parameters_is_told_from_another_optimizer(workdir: pathlib.Path) -> None:
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), a_state())
    table = abstract.weights["head"]["table"]
    with Checkpoints(workdir) as checkpoints:
        state = a_state()._replace(optimizer={"nu": jnp.arange(4.0)})
        checkpoints.save(state, 6, layers=LAYERS, fingerprint="data")
    for change, message in (
        ({"weights": abstract.weights | {"head": {"table": table, "bias": table}}}, "another network, whose"),
        ({"optimizer": {"mu": table}}, "another kind of optimizer state: optimizer.mu, optimizer.nu are on one side"),
    ):
        with Checkpoints(workdir) as checkpoints, pytest.raises(CheckpointError, match=message):
            checkpoints.restore_newest(abstract._replace(**change), layers=LAYERS)


def test_weights_alone_are_read_where_an_optimizer_is_wanted(workdir: pathlib.Path) -> None:
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    wanted = a_state()._replace(optimizer={"mu": jnp.arange(4.0)})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), wanted)
    with Checkpoints(workdir) as checkpoints:
        state = checkpoints.restore_newest(abstract, layers=LAYERS, fingerprint="data")
    assert state is not None
    assert state.optimizer == ()
    jax.tree.map(np.testing.assert_array_equal, state.weights, a_state().weights)
