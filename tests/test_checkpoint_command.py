"""`fiddlex checkpoint`: what it prints, for people and programs, and its status."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.checksums import text_checksum
from fiddlex.train.run.checkpoints.meta import read_meta
from fiddlex.train.step.state import SavedState
from tests.programs import call


def state(step: int) -> SavedState:
    weights = {
        "layers": {"kernel": jnp.full((2, 3, 4), 0.5).at[0, 0, 0].set(step)},
        "head": {"table": jnp.ones((5, 4))},
    }
    return SavedState(jnp.int32(0), weights, {"mu": jnp.zeros((2, 3, 4)), "count": jnp.int32(step)})


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
    """Checkpoints of steps 8 and 10, a best one, one that was moved aside, one that was not finished."""
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        for step in (8, 9, 10):
            checkpoints.save(state(step), step, layers=(0, -1), fingerprint="data")
        checkpoints.wait()
        checkpoints.set_aside([9])
    older = {"version_1": {"head": {"table": jnp.ones((5, 4), jnp.bfloat16)}}}
    with Checkpoints(tmp_path, name="best") as best:
        best.save(state(8)._replace(optimizer=(), older=older), 8, layers=(0, -1), fingerprint="data")
    unfinished = tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "part").write_bytes(b"12345")
    return tmp_path


def as_json(*arguments: object, status: int = 0) -> dict:
    found: dict = json.loads(call("checkpoint", *arguments, "--format=json", status=status).stdout.splitlines()[-1])
    return found


def test_list(workdir: pathlib.Path) -> None:
    shutil.copytree(workdir / "checkpoints" / "8", workdir / "checkpoints" / "8 copy")
    lines = call("checkpoint", "list", workdir).stdout.splitlines()
    first, held, *_ = lines
    assert any(line.startswith("checkpoints/8 copy: renamed, ") for line in lines)
    assert first.startswith("checkpoints/8: finished, ")
    assert held == "  step 8 of 32 parameters: optimizer (int32, float32), weights (float32)"
    assert any(line.startswith("checkpoints/12.orbax-checkpoint-tmp: unfinished, 5 bytes, ") for line in lines)
    assert any(line.startswith("damaged_checkpoints/9-") and ": set aside, " in line for line in lines)
    found = as_json("list", workdir)["checkpoints"]
    assert [(pathlib.Path(each["path"]).name.partition("-")[0], each["state"]) for each in found] == [
        ("8", "finished"),
        ("8 copy", "renamed"),
        ("10", "finished"),
        ("12.orbax", "unfinished"),
        ("8", "finished"),
        ("9", "set aside"),
    ]
    assert [each["step"] for each in found] == [8, 8, 10, None, 8, 9]
    assert found[4]["dtypes"] == {"version_1": ["bfloat16"], "weights": ["float32"]}
    path = workdir / "checkpoints" / "10"
    assert found[2]["num_bytes"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_verify(workdir: pathlib.Path) -> None:
    (workdir / "checkpoints" / "-1").mkdir()  # no step has that number
    assert call("checkpoint", "verify", workdir).stdout.count(": whole; ") == 3
    file = max((workdir / "checkpoints" / "10" / "weights").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    name = file.relative_to(workdir / "checkpoints" / "10").as_posix()
    done = call("checkpoint", "verify", workdir, status=1)
    assert f"\n  file {name}: it is not what was written" in done.stdout
    assert done.stdout.count(": whole; ") == 2
    assert (
        f"1 of 3 checkpoints is damaged: {workdir}/checkpoints/10. Put back an intact copy; until then fiddlex goes on "
        "from the newest whole one."
    ) in done.stderr
    assert call("checkpoint", "verify", workdir, 8).stdout.count(": whole; ") == 2  # the best one too
    (found,) = as_json("verify", workdir, 10, status=1)["checkpoints"]
    assert list(found["damaged_files"]) == [name]
    assert found["whole"] is False


def test_verify_of_a_damaged_list_of_files(workdir: pathlib.Path) -> None:
    (workdir / "checkpoints" / "8" / "SHA256SUMS").write_bytes(b"\xff garbage")
    done = call("checkpoint", "verify", workdir, 8, status=1)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("checkpoints/8"))
    assert ": DAMAGED; " in line
    assert ", files not compared, " in line
    assert (
        "\n  file SHA256SUMS: the list of digests is itself damaged: its lines have another SHA-256 digest than its "
        "first line says. Of the other files it is not known whether they are what was written\n"
    ) in done.stdout
    shutil.rmtree(workdir / "best")
    done = call("checkpoint", "verify", workdir, 8, status=1)
    assert (
        f"1 of 1 checkpoint is damaged: {workdir}/checkpoints/8. Put back an intact copy; until then fiddlex goes on "
        "from the newest of the others that is whole. To see whether one is, run fiddlex checkpoint verify without a "
        "step."
    ) in done.stderr
    shutil.rmtree(workdir / "checkpoints" / "10")
    done = call("checkpoint", "verify", workdir, 9, status=1)
    assert "has no finished checkpoint of step 9. It has that of step 8." in done.stderr


def test_verify_without_a_whole_checkpoint_says_that_the_run_cannot_go_on(workdir: pathlib.Path) -> None:
    for step in ("8", "10"):
        (workdir / "checkpoints" / step / "SHA256SUMS").write_bytes(b"\xff garbage")
    text = (
        "The run cannot go on, since no checkpoint in checkpoints/ is whole. Put back an intact copy, or choose a new "
        "--workdir to start again."
    )
    done = call("checkpoint", "verify", workdir, status=1)
    assert done.stdout.count(": whole; ") == 1  # the best weights, from which no run goes on
    assert f"2 of 3 checkpoints are damaged: {workdir}/checkpoints/8, {workdir}/checkpoints/10. {text}" in done.stderr
    shutil.rmtree(workdir / "checkpoints" / "8")
    done = call("checkpoint", "verify", workdir, 10, status=1)
    assert f"1 of 1 checkpoint is damaged: {workdir}/checkpoints/10. {text}" in done.stderr


def test_verify_of_a_damaged_array_without_a_list_of_files(workdir: pathlib.Path) -> None:
    path = workdir / "checkpoints" / "10"
    (path / "SHA256SUMS").unlink()
    assert "files without a list of digests" in call("checkpoint", "verify", workdir, 10).stdout
    for file in (path / "weights").rglob("d/*"):
        file.write_bytes(b"")
    done = call("checkpoint", "verify", workdir, 10, status=1)
    assert "\n  weights/: 2 arrays cannot be read, of weights.head.table: " in done.stdout


def test_a_missing_file_takes_one_line_and_another_for_the_arrays(workdir: pathlib.Path) -> None:
    path = workdir / "checkpoints" / "10"
    (path / "optimizer" / "manifest.ocdbt").unlink()
    assert call("checkpoint", "verify", workdir, 10, status=1).stdout.splitlines()[1:] == [
        "  file optimizer/manifest.ocdbt: it is missing",
        "  optimizer/: 2 arrays cannot be read, because of a file above",
    ]
    line = "  cannot be read: optimizer/: files in it are missing or damaged, which verify names"
    assert line in call("checkpoint", "list", workdir).stdout.splitlines()
    shutil.rmtree(path / "optimizer")
    assert "  cannot be read: optimizer/: it is missing" in call("checkpoint", "list", workdir).stdout.splitlines()


def test_diff(workdir: pathlib.Path) -> None:
    text = call("checkpoint", "diff", workdir, 8, 10).stdout
    assert text.splitlines()[1:] == [
        "  step: 8 and 10",
        "  optimizer.count: 1 of 1 element differs, by at most 2 (relative 0.2)",
        "  weights.layers.kernel: 1 of 12 elements differs, by at most 2 (relative 0.2)",
        "  2 of 4 arrays that both have are equal bit for bit",
    ]
    assert call("checkpoint", "diff", workdir, 8, workdir, 10).stdout == text
    found = as_json("diff", workdir, 8, 10)
    assert found["meta"] == {"step": [8, 10]}
    assert [each["name"] for each in found["arrays"] if not each["equal"]] == [
        "optimizer.count",
        "weights.layers.kernel",
    ]


def test_diff_names_arrays_that_are_not_what_was_saved(workdir: pathlib.Path) -> None:
    """As if a number had changed in a file that decodes without an error."""
    path = workdir / "checkpoints" / "10"
    meta = read_meta(path)
    meta["checksums"]["weights.head.table"] = 7
    (path / "meta" / "metadata").write_text(json.dumps(meta | {"checksum": text_checksum(meta)}))
    done = call("checkpoint", "diff", workdir, 8, 10, status=1)
    assert "\n  weights.head.table: DAMAGED in the second: its checksum is " in done.stdout
    assert "1 array is not what was saved, so not all differences are those of training." in done.stderr
    first, second = as_json("diff", workdir, 8, 10, status=1)["damaged"]
    assert first == {}
    assert list(second) == ["weights.head.table"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "{}/nowhere"), "/nowhere is not a directory. Name the --workdir of a run."),
        (("list", "{}/best/8"), "has no checkpoints and no config.json."),
        (("verify", "{}/best/8"), "has no finished checkpoint. Name the --workdir of a run that has saved one."),
        (("verify", "{}", 9), "has no finished checkpoint of step 9. It has those of steps 8, 10."),
        (("diff", "{}", 8, 9), "has no finished checkpoint of step 9."),
    ],
)
def test_what_is_not_there_is_told(arguments: tuple, message: str, workdir: pathlib.Path) -> None:
    done = call("checkpoint", *(str(each).format(workdir) for each in arguments), status=1)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
