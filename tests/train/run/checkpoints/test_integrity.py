"""Every fault of a file of a checkpoint is found, and never gives a wrong number."""

import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.errors import CheckpointError
from fiddlex.train.run.checkpoints import file_digests
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.checksums import text_checksum
from fiddlex.train.run.checkpoints.differences import difference
from fiddlex.train.run.checkpoints.file_digests import LIST, damaged_files, read_list, record_all, record_own
from fiddlex.train.run.checkpoints.inventory import entries, verify
from fiddlex.train.run.checkpoints.meta import read_meta
from fiddlex.train.step.state import SavedState

GOOD, BAD = 5, 6  # steps: the older checkpoint stays whole, the newer is damaged
UNLISTED = ("commit_success.txt", "_CHECKPOINT_METADATA")  # which orbax writes at the very end, and nobody reads


def a_state(step: int) -> SavedState:
    """Arrays that orbax keeps in files of their own, others that it keeps in its index, and zeros of both signs."""
    rng = np.random.default_rng(step)
    kernel, bias = rng.normal(size=(3, 40, 20)).astype(np.float32), np.float32([0.0, -0.0, step])
    weights = {"layers": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}, "head": {"table": jnp.zeros(9)}}
    return SavedState(jnp.int32(0), weights, {"mu": jnp.asarray(kernel * 2), "count": jnp.int32(step)})


def restored(workdir: pathlib.Path, *, move_damaged: bool = False) -> SavedState:
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), a_state(GOOD))
    with Checkpoints(workdir) as checkpoints:
        state = checkpoints.restore_newest(abstract, layers=(0, 1, 2), move_damaged=move_damaged)
    assert state is not None
    return state


def same_bits(a: SavedState, b: SavedState) -> bool:
    pairs = zip(*(jax.tree.leaves((state.weights, state.optimizer)) for state in (a, b)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A workdir with both checkpoints; a test that damages one puts it back."""
    workdir = tmp_path_factory.mktemp("saved")
    with Checkpoints(workdir) as checkpoints:
        for step in (GOOD, BAD):
            checkpoints.save(a_state(step), step, layers=(0, 1, 2), fingerprint="data")
    return workdir


def files_of(path: pathlib.Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def flips(data: bytes) -> Iterator[bytes]:
    """One bit flipped: in the first byte, in the last, and in several between them."""
    for number, place in enumerate(sorted({0, len(data) // 3, len(data) // 2, 2 * len(data) // 3, len(data) - 1})):
        changed = bytearray(data)
        changed[place] ^= 1 << (3 * number + 1) % 8
        yield bytes(changed)


def cuts(data: bytes) -> Iterator[bytes]:
    for length in sorted({0, 1, len(data) // 2, len(data) - 1} - {len(data)}):
        yield data[:length]


def removals(data: bytes) -> Iterator[None]:
    yield None


DAMAGE = [flips, cuts, removals]
Damage = Callable[[bytes], Iterator[bytes | None]]


def faults(path: pathlib.Path, damage: Damage) -> Iterator[str]:
    """Damages one file after another, yields its name each time, and puts it back."""
    for name in files_of(path):
        data = (path / name).read_bytes()
        for changed in damage(data):
            if changed is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(changed)
            yield name
            (path / name).write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_fault_in_any_file_is_found_and_the_older_checkpoint_is_used(
    damage: Damage, saved: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved / "checkpoints" / str(BAD)
    found = set()
    for name in faults(path, damage):
        verdict, state, told = verify(path), restored(saved), caplog.text
        caplog.clear()
        if name.endswith(UNLISTED) or (name == LIST and not (path / LIST).exists()):
            assert verdict.whole
            assert same_bits(state, a_state(BAD))
            continue
        assert name in verdict.damaged_files
        assert int(state.step) == GOOD
        assert same_bits(state, a_state(GOOD))
        assert f"The checkpoint of step {BAD} cannot be read and is passed over. {path}: " in told
        assert f"{name}: {'the list of digests is itself damaged' if name == LIST else 'it is'}" in told
        found.add(name)
    listed = set(read_list(path))
    assert found - {LIST} == listed
    assert {name.partition("/")[0] for name in listed} == {"meta", "optimizer", "weights"}
    assert verify(path).whole


@pytest.mark.parametrize("kind", ["a link to ", "a pipe or a device, "])
def test_a_link_or_a_pipe_in_a_checkpoint_is_damage(
    kind: str, saved: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, limited: None
) -> None:
    """In the place of each file, also of one that nobody reads, and where there is no list of files."""
    path = tmp_path / "checkpoints" / str(BAD)
    names = files_of(saved / "checkpoints" / str(BAD))
    for name, listed in [*((name, True) for name in names), ("weights/_METADATA", False)]:
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        if not listed:
            (path / LIST).unlink()
        (path / name).replace(tmp_path / "elsewhere")
        if kind == "a link to ":
            (path / name).symlink_to(tmp_path / "elsewhere")
        else:
            os.mkfifo(path / name)
        assert f"it is {kind}" in verify(path).damaged_files[name]
        assert same_bits(restored(tmp_path), a_state(GOOD))
        assert f"{name}: it is {kind}" in caplog.text
        (entry,) = (entry for entry in entries(tmp_path) if entry.path == path)
        assert entry.reason.startswith(f"{name}: it is {kind}")
        with pytest.raises(CheckpointError, match=f"{name}: it is {kind}"):
            difference(path, path.with_name(str(GOOD)))
        caplog.clear()
        shutil.rmtree(tmp_path / "checkpoints")


def test_folders_in_a_checkpoint_are_not_links_and_its_own_may_be_one(
    saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    elsewhere = shutil.copytree(saved / "checkpoints" / str(BAD), tmp_path / "elsewhere")
    path = tmp_path / "checkpoints" / str(BAD)
    path.parent.mkdir()
    path.symlink_to(elsewhere)
    assert verify(path).whole
    assert same_bits(restored(tmp_path), a_state(BAD))
    (elsewhere / "weights").rename(tmp_path / "weights")
    (elsewhere / "weights").symlink_to(tmp_path / "weights")
    assert list(damaged_files(path)) == ["weights"]
    with pytest.raises(CheckpointError, match=f"weights: it is a link to {tmp_path}/weights, and a checkpoint has"):
        restored(tmp_path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_without_a_list_of_files_no_fault_gives_a_wrong_number(
    damage: Damage, saved: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in checkpoints of earlier versions. What is read is the newer checkpoint, or after a warning the older."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / str(BAD)
    (path / LIST).unlink()
    passed_over = set()
    for name in faults(path, damage):
        state, told = restored(tmp_path), caplog.text
        caplog.clear()
        step = int(state.step)
        for x, y in zip(*(jax.tree.leaves((s.weights, s.optimizer)) for s in (state, a_state(step))), strict=True):
            np.testing.assert_array_equal(x, y)  # either zero: the checksum takes no account of its sign
        assert (f"The checkpoint of step {BAD} cannot be read" in told) == (step == GOOD)
        if not verify(path).whole:
            assert step == GOOD, name
            passed_over.add(name.partition("/")[0])
    assert {"meta", "weights", "optimizer"} <= passed_over


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("checksums", 7, "its checksum is .*, and 7 was saved"), ("shapes", [3], r"its shape is \(9,\), and \(3,\) was")],
)
def test_an_array_that_is_not_what_was_saved_is_named(
    field: str, value: object, message: str, saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """As if the array had changed, in a file that decodes without an error."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / str(BAD)
    meta = read_meta(path)
    meta[field]["weights.head.table"] = value
    (path / "meta" / "metadata").write_text(json.dumps(meta | {"checksum": text_checksum(meta)}))
    (path / LIST).unlink()
    verdict = verify(path)
    ((name, reason),) = (verdict.damaged_arrays | verdict.unreadable_arrays).items()
    assert name == "weights.head.table"
    assert re.search(message, reason)


def test_weights_alone_do_not_need_the_optimizers_files(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / str(BAD)
    (path / "optimizer" / "_METADATA").unlink()
    assert damaged_files(path) == {"optimizer/_METADATA": "it is missing"}
    assert damaged_files(path, items=("weights", "meta")) == {}
    sharding = NamedSharding(make_mesh(MeshConfig()), P())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), a_state(BAD))
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.restore_newest(abstract._replace(optimizer=()), layers=(0, 1, 2))
    assert state is not None
    assert int(state.step) == BAD


def test_each_file_is_in_one_process_share(saved: pathlib.Path) -> None:
    path = saved / "checkpoints" / str(BAD)
    read: list[str] = []
    for index in range(3):
        damaged_files(path, share=(index, 3), told=lambda name, size: read.append(name))
    assert sorted(read) == sorted(read_list(path))


def test_the_first_process_does_not_read_again_what_another_has_recorded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are in folders with other names when the others record them."""
    path = tmp_path / f"{BAD}.orbax-checkpoint-tmp"
    for name in ("weights.orbax-checkpoint-tmp/ocdbt.process_1/d/a", "weights.orbax-checkpoint-tmp/ocdbt.process_0/b"):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text(name)
    for _ in range(2):  # before each of orbax's waits
        record_own(tmp_path, BAD, 1)
    (path / "weights.orbax-checkpoint-tmp").rename(path / "weights")
    read, digest = [], file_digests._digest
    monkeypatch.setattr(file_digests, "_digest", lambda file: read.append(file.name) or digest(file))
    record_all(tmp_path, BAD)
    finished = path.rename(tmp_path / str(BAD))
    record_own(tmp_path, BAD, 1)  # as the checkpoint has its name
    assert read == ["b"]
    assert set(read_list(finished)) == {"weights/ocdbt.process_1/d/a", "weights/ocdbt.process_0/b"}
    assert damaged_files(finished) == {}
    assert [file.name for file in finished.iterdir() if file.is_file()] == [LIST]


def test_a_list_that_names_files_elsewhere_is_refused(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / str(BAD)
    line = f"{hashlib.sha256(b'').hexdigest()}  ../../elsewhere\n"
    (path / LIST).write_text(f"# {hashlib.sha256(line.encode()).hexdigest()}  the lines below\n{line}")
    assert "outside of the checkpoint" in damaged_files(path)[LIST]


def test_a_checkpoint_whose_files_cannot_be_read_back_is_not_finished(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*ignored: object) -> str:
        raise OSError(5, "Input/output error")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(a_state(GOOD), GOOD, layers=(0, 1, 2), fingerprint="data")
        checkpoints.wait()
        monkeypatch.setattr("fiddlex.train.run.checkpoints.file_digests._digest", fail)
        checkpoints.save(a_state(BAD), BAD, layers=(0, 1, 2), fingerprint="data")
        with pytest.raises(CheckpointError, match=r"Cannot write a checkpoint .*Input/output error"):
            checkpoints.wait()
        assert checkpoints.steps() == [GOOD]
