"""What a person sees of damaged checkpoints: a line about each."""

import asyncio
import pathlib
import subprocess
from collections.abc import Callable

import pytest

from fiddlex.train.run import workdir as workdirs
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.checkpoints.reading import _patient
from fiddlex.train.trainer import Trainer
from tests.small_run import ENVIRONMENT, config_of, small, train_line


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


# What happens to which files of a checkpoint's weights, the largest first. Only files of `d` that hold arrays count;
# there are one to three of them, which differs from one save to the next. Where there are several, the smallest is read
# in no time and the largest is not, so that the one fails while the reads of the other are running.
ARRAYS = 100_000  # bytes: files of `d` below this hold the index, or nothing that is still read
DAMAGE: list[tuple[Callable[[pathlib.Path], None], str, slice]] = [
    (truncate, "ocdbt.process_0/d/*", slice(0, None)),
    (truncate, "ocdbt.process_0/d/*", slice(-1, None)),
    (flip, "ocdbt.process_0/d/*", slice(-1, None)),
    (empty, "ocdbt.process_0/d/*", slice(-1, None)),
    (pathlib.Path.unlink, "ocdbt.process_0/d/*", slice(-1, None)),
    (truncate, "array_metadatas/*", slice(1)),
    (empty, "_METADATA", slice(1)),
]


def test_a_damaged_checkpoint_is_told_in_one_line(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    """Whatever happened to it, and however many of its arrays were being read."""
    values = small(text_file, mesh_data=2, mesh_tensor=2, model_hidden_size=256, train_num_steps=1)
    config = config_of(values)
    trainer = Trainer(config)
    with workdirs.claimed(tmp_path, config):
        workdirs.write_config(tmp_path, config, schedule=trainer.layout.pipeline.lowered.schedule)
    with Checkpoints(tmp_path, keep_last=len(DAMAGE) + 1) as checkpoints:
        for trainer.step in range(1, len(DAMAGE) + 2):
            trainer.save(checkpoints)
    for step, (damage, pattern, which) in enumerate(DAMAGE, 2):
        files = list((tmp_path / "checkpoints" / str(step) / "weights").glob(pattern))
        sizes = {path: path.stat().st_size for path in files if "/d/" not in pattern or path.stat().st_size > ARRAYS}
        chosen = sorted(sizes, key=sizes.__getitem__, reverse=True)[which]
        assert chosen
        for path in chosen:
            damage(path)

    line = train_line(tmp_path, values)
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    told = [line for line in lines if "cannot be read and is passed over" in line]
    assert [line.split()[4] for line in told] == [str(step) for step in range(len(DAMAGE) + 1, 1, -1)]
    end = lines.index("Next:")  # after it come commands
    assert [line.split()[0] for line in lines[:end] if line not in told] == [
        "The",  # platform is CPU
        f"text:{text_file}:",
        "gpt",
        "Resuming",  # from step 1
        "Nothing",  # to train
        "Done:",
    ]
    moved = {path.name.partition("-")[0] for path in (tmp_path / "damaged_checkpoints").iterdir()}
    assert moved == {str(step) for step in range(2, len(DAMAGE) + 2)}


def test_a_read_that_fails_waits_for_those_that_have_begun() -> None:
    """As orbax reads: the arrays at once, and of each its parts at once."""
    ended = []

    async def part(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if name == "bad":
            raise ValueError(name)
        ended.append(name)

    async def array(*parts: tuple[str, float]) -> None:
        await asyncio.sleep(0.01)
        await asyncio.gather(*(part(*each) for each in parts))

    async def read() -> None:
        await asyncio.gather(array(("bad", 0.0), ("beside it", 0.1)), array(("later", 0.2), ("bad", 0.05)))

    async def restore() -> None:
        with pytest.raises(ValueError, match="bad"):
            await _patient(read)()
        assert ended == ["beside it", "later"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(restore())
