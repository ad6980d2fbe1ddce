"""Every sample once in an epoch, from the logs of what runs were trained on: restarts, layouts, caches, shares."""

import json
import pathlib
import shutil

import pytest

from fiddlex.data import NextTokenExamples
from fiddlex.data.dataset import load_dataset
from fiddlex.data.sample_log import FOLDER, Sample, example_checksum, read_sample_log
from fiddlex.errors import DataError
from fiddlex.train.loop import train
from tests.small_run import config_of, small

BATCH, STEPS = 4, 14


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} sheep jump.\n" for number in range(20)))  # 20 samples, so 2.8 epochs
    return path


def values(text: pathlib.Path, **fields: object) -> dict[str, object]:
    fixed = {"data_log_samples": True, "data_eval_fraction": 0.0, "train_num_steps": STEPS, "train_log_every": 1}
    return small(text, **(fixed | fields))


def losses(workdir: pathlib.Path) -> list[float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def prove_once(workdir: pathlib.Path, text: pathlib.Path) -> list[Sample]:
    """Proves from the log that each example was seen once in an epoch, as the source has it; returns all in order."""
    source = load_dataset(config_of(values(text))).train
    assert isinstance(source, NextTokenExamples)
    log = read_sample_log(workdir, batch_size=BATCH)
    assert list(log)[:STEPS] == list(range(1, STEPS + 1))
    samples = [sample for step in range(1, STEPS + 1) for sample in log[step]]
    size = len(source)
    for start in range(0, len(samples), size):
        epoch = samples[start : start + size]
        assert {sample.epoch for sample in epoch} == {start // size}
        numbers = [sample.number for sample in epoch]
        assert len(set(numbers)) == len(numbers)
        assert len(numbers) < size or set(numbers) == set(range(size))
    for sample in samples:
        assert sample.checksum == example_checksum(source.example(sample.number, epoch=sample.epoch))
    assert len(samples) > 2 * size
    return samples


@pytest.mark.parametrize(
    "fields",
    [{"data_share": "FILE/x"}, {"data_sample_cache_folder": "FILE/x", "data_sample_cache_gib": 1.0}],
)
def test_a_folder_that_cannot_be_used_ends_a_run_before_it_begins(text, tmp_path, fields):
    (tmp_path / "file").touch()
    wrong = {name: f"{tmp_path}/file/x" if value == "FILE/x" else value for name, value in fields.items()}
    with pytest.raises(DataError, match=rf"data\.{next(iter(fields))[5:]}={tmp_path}/file/x: .*Name a folder"):
        train(config_of(values(text, **wrong)), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # it is made before the step is compiled


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory) -> tuple[list[Sample], list[float]]:
    workdir = tmp_path_factory.mktemp("undisturbed")
    train(config_of(values(text)), workdir)
    return prove_once(workdir, text), losses(workdir)


def test_restarts_on_other_layouts_and_caches_change_nothing(text, undisturbed, tmp_path):
    workdir, cache = tmp_path / "run", {"data_sample_cache_gib": 5e-7, "data_sample_cache_folder": str(tmp_path / "c")}
    train(config_of(values(text, train_num_steps=6, train_checkpoint_every=3, **cache)), workdir)
    path = workdir / FOLDER / "rank-0.jsonl"
    path.write_bytes(path.read_bytes()[:-30])  # killed while it wrote
    shutil.rmtree(workdir / "checkpoints" / "6")
    share = {"data_share": str(tmp_path / "share"), "data_num_threads": 3}
    train(config_of(values(text, train_checkpoint_every=3, mesh_data=2, **cache, **share)), workdir)
    samples, expected = undisturbed
    assert prove_once(workdir, text) == samples
    assert losses(workdir) == pytest.approx(expected, rel=1e-5)
    starts = [json.loads(line)["start"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert sorted(set(starts)) == [0, 3]
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert sum(record.get("data_cache_hits", 0) for record in records if record["step"] > 3) > 0
    assert {"data_fetched", "data_prepared", "data_taken"} <= records[-2].keys()


def test_disagreement_in_a_log_is_an_error(text, undisturbed, tmp_path):
    (tmp_path / FOLDER).mkdir()
    line = {"step": 1, "rows": [0, 1], "samples": [[0, 5, 0, 1], [0, 6, 0, 1]]}
    (tmp_path / FOLDER / "rank-0.jsonl").write_text(json.dumps(line) + "\n\n" + '{"step": 2, "ro')
    assert read_sample_log(tmp_path, batch_size=2) == {1: [Sample(0, 5, 0, 1), Sample(0, 6, 0, 1)]}
    assert read_sample_log(tmp_path, batch_size=3) == {}
    (tmp_path / FOLDER / "rank-1.jsonl").write_text(json.dumps(line | {"samples": [[0, 5, 0, 1], [0, 7, 0, 1]]}))
    with pytest.raises(DataError, match=r"rank-1\.jsonl: step 1, row 1 has"):
        read_sample_log(tmp_path, batch_size=2)
