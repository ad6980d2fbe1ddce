"""A workdir that an earlier version of fiddlex left goes on, and its losses are those of that version.

Commit 85cf73a wrote `workdir_85cf73a.tar.xz`, with jax 0.10.2: a run of eight steps whose checkpoint of step 8 was
removed since, and with it the state that the last two steps led to. The metrics are those of the whole run.
"""

import json
import pathlib
import tarfile

import pytest

from fiddlex.config.overrides import override
from fiddlex.train import loop
from fiddlex.train.run.workdir import read_config

STORED = pathlib.Path(__file__).with_name("workdir_85cf73a.tar.xz")
THREE_STAGES = "mesh.data=1 mesh.pipe=3 pipeline.schedule=1f1b pipeline.num_chunks=1 pipeline.num_microbatches=4"


@pytest.mark.parametrize("layout", [pytest.param("", marks=pytest.mark.long), THREE_STAGES])
def test_a_run_of_an_earlier_version_goes_on(layout: str, tmp_path: pathlib.Path) -> None:
    """It has interleaved stages, whose rows move on another layout; ZeRO-1; and, after sync, 2BW with older weights."""
    run = tmp_path / "run"
    with tarfile.open(STORED) as archive:
        archive.extractall(run, filter="data")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:6]))  # up to the checkpoint
    (tmp_path / "squares.txt").write_text(" ".join(str(n * n) for n in range(3000)))
    config = override(read_config(run), f"data.source=text:{tmp_path / 'squares.txt'}", *layout.split())
    assert loop.train(config, run).step == 8
    assert losses(metrics.read_text().splitlines()) == pytest.approx(losses(lines), rel=1e-5)


def losses(lines: list[str]) -> dict[tuple[int, str], float]:
    """Each loss of the records of a run, that of training and that of the evaluation, by its step and name."""
    records = map(json.loads, lines)
    return {
        (record["step"], name): record[name] for record in records for name in ("loss", "eval_loss") if name in record
    }
