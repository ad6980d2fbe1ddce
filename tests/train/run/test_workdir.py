"""The files of a workdir that say what its run is."""

import logging
import os
import pathlib
import re
from typing import Any

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.data.tokenizers import tokenizer_digest
from fiddlex.errors import CheckpointError
from fiddlex.schedules.generators import make_schedule
from fiddlex.train.run.workdir import (
    DIGESTS,
    check_same_run,
    check_same_shapes,
    claimed,
    read_config,
    write_config,
)


@pytest.mark.parametrize("lost", ["config.json", "schedule.csv"])
def test_a_config_takes_the_place_of_the_former_once_it_is_on_disk(
    lost: str, tiny_config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sync = tiny_config, os.fsync
    config.pipeline.schedule = "file:/tmp/somewhere.csv"
    former, other = (make_schedule(name, pipe=2, num_microbatches=2) for name in ("gpipe", "1f1b"))
    with claimed(tmp_path, config):
        write_config(tmp_path, config, schedule=former)
    kept = (tmp_path / lost).read_text()
    assert read_config(tmp_path).pipeline.schedule == f"file:{tmp_path}/schedule.csv"

    def full(number: int) -> None:
        if pathlib.Path(f"/proc/self/fd/{number}").readlink().name == f"{lost}.tmp":
            raise OSError("the disk is full")
        sync(number)

    config.train.seed = 7
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(CheckpointError, match=r"Cannot write to .*: the disk is full"),
        claimed(tmp_path, config),
    ):
        write_config(tmp_path, config, schedule=other)
    assert (tmp_path / lost).read_text() == kept
    monkeypatch.undo()
    with claimed(tmp_path, config):
        write_config(tmp_path, config, schedule=other)
    assert (tmp_path / lost).read_text() != kept
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("field", "written", "otherwise"),
    [
        ("data.source", "text:/d", "text:/d/"),
        ("data.source", "text:/d/notes", "text:notes"),
        ("data.eval_source", "tokens:/d/a.bin", "tokens:x/../a.bin"),
        ("data.source", "megatron:/d/a", "megatron:a"),
        ("data.source", "megatron:.7:/d/a,0.3:/d/b", "megatron:.7:./a,0.3:b"),
        ("data.tokenizer", "/d/tokenizer.json", "tokenizer.json"),
        ("data.cache", "/d/kept", "kept/"),
        ("train.init_from", "hf:/d/model", "hf:model"),
        ("train.init_from", "/d/run", "run"),
        ("train.topology", "/d/mine.toml", "mine.toml"),
        ("train.topology", "h100", "h100"),
        ("data.source", "stdlib", "stdlib"),
    ],
)
def test_two_ways_to_write_a_path_are_one_run_and_a_workdir_keeps_the_absolute_one(
    field: str,
    written: str,
    otherwise: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/d")
    saved, config = replaced(Config(), {field: written}), replaced(Config(), {field: otherwise})
    with caplog.at_level(logging.INFO, "fiddlex"):
        check_same_run(saved, config, tmp_path)
    assert not caplog.messages
    write_config(tmp_path, config, schedule=make_schedule("1f1b", pipe=1, num_microbatches=1))
    section, _, name = field.partition(".")
    assert getattr(getattr(read_config(tmp_path), section), name) == written


@pytest.mark.parametrize("field", ["data.source", "data.eval_source", "data.tokenizer"])
def test_data_under_another_path_are_those_of_the_run_by_their_digest(field: str, tmp_path: pathlib.Path) -> None:
    was, now = ("/d/a", "/d/b") if field == "data.tokenizer" else ("text:/d/a", "text:/d/b")
    saved, config = replaced(Config(), {field: was}), replaced(Config(), {field: now})
    digests = dict.fromkeys(["data.source", "data.eval_source", "data.tokenizer"], "text 1234")
    schedule = make_schedule("1f1b", pipe=1, num_microbatches=1)
    write_config(tmp_path, saved, schedule=schedule, digests=digests)
    check_same_run(saved, config, tmp_path, digests)
    others = [digests | {field: "text 5678"}, {}]
    if field == "data.source":  # which also holds out what the run is evaluated on
        others.append(digests | {"data.eval_source": "text 5678"})
    for other in others:
        with pytest.raises(CheckpointError, match=f"{field} is '{now}', was '{was}'"):
            check_same_run(saved, config, tmp_path, other)


@pytest.mark.parametrize(
    ("was", "now", "changed", "told"),
    [
        ({}, {}, ["source"], {"source": "its contents differ"}),
        ({}, {}, ["eval_source"], {"source": "what it holds out differs"}),
        (
            {"eval_source": "text:/d/e"},
            {"eval_source": "text:/e/e"},
            ["eval_source"],
            {"eval_source": "its contents differ"},
        ),
        (
            {"eval_source": "text:/d/e"},
            {"eval_source": "text:/e/e"},
            ["source", "eval_source"],
            {"source": "its contents differ", "eval_source": "its contents differ"},
        ),
        ({"eval_source": "text:/d/e"}, {}, ["eval_source"], {"eval_source": ""}),
        ({}, {"seed": 3}, ["source"], {"source": "", "seed": ""}),
        ({}, {"source": "hf:/e/a"}, ["source"], {"source": ""}),
    ],
)
def test_data_that_have_moved_and_changed_are_told_by_their_fingerprints(
    was: dict[str, Any], now: dict[str, Any], changed: list[str], told: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """Not where another field, kind of data or content of the tokenizer's file may be why they differ."""

    def run(fields: dict[str, Any], others: list[str]) -> tuple[Config, dict[str, str]]:
        config = replaced(Config(), {f"data.{name}": value for name, value in fields.items()})
        kinds = {name: getattr(config.data, name).partition(":")[0] for name in ("source", "eval_source")}
        return config, {
            f"data.{name}": f"{kind} {'5-cd' if name in others else '4-ab'}" for name, kind in kinds.items()
        }

    (saved, before), (config, after) = (
        run({"source": "text:/d/a"} | was, []),
        run({"source": "text:/e/a"} | now, changed),
    )
    write_config(tmp_path, saved, schedule=make_schedule("1f1b", pipe=1, num_microbatches=1), digests=before)
    with pytest.raises(CheckpointError) as error:
        check_same_run(saved, config, tmp_path, after)
    _, *lines, remedy = str(error.value).splitlines()
    notes = {name: f", and {what} too: fingerprint 5-cd, was 4-ab" if what else "" for name, what in told.items()}
    for line, (name, note) in zip(lines, notes.items(), strict=True):
        assert re.fullmatch(rf"  data\.{name} is [^ ,]+, was [^ ,]+{note}", line)
    assert remedy.startswith(
        "Put the former data there, or" if any(told.values()) else "Set these fields back to go on"
    )
    with pytest.raises(CheckpointError, match=r"was [^ ,]+\nSet these fields back to go on"):
        check_same_run(saved, config, tmp_path, after | {"data.tokenizer": "6-ef"})


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ({"data.tokenizer": "/d/t.json"}, "data.tokenizer names"),
        ({"data.eval_source": "text:/d/e"}, "data.eval_source names"),
        ({}, "data.source holds out"),
    ],
)
def test_data_that_have_changed_under_the_same_path_are_those_of_another_run(
    field: dict[str, str], what: str, tmp_path: pathlib.Path
) -> None:
    config = replaced(Config(), field)
    digests = dict.fromkeys(["data.source", "data.eval_source", "data.tokenizer"], "text 1234")
    write_config(tmp_path, config, schedule=make_schedule("1f1b", pipe=1, num_microbatches=1), digests=digests)
    changed = next(iter(field), "data.eval_source")
    check_same_run(config, config, tmp_path, digests)
    with pytest.raises(CheckpointError, match=f"of a run with other data: what {what} has changed since"):
        check_same_run(config, config, tmp_path, digests | {changed: "text 5678"})


def test_digests_that_cannot_be_read_are_told(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / DIGESTS).write_text("{")
    check_same_run(Config(), Config(), tmp_path, {"data.tokenizer": "bytes"})
    assert "data.json cannot be read" in caplog.text


def test_weights_are_not_used_with_another_tokenizer_at_its_path(tmp_path: pathlib.Path) -> None:
    """Neither spaces nor line ends in its JSON make another one."""
    file = tmp_path / "t.json"
    file.write_text('{"a": [1, 2]}')
    config = replaced(Config(), {"data.tokenizer": str(file)})
    digests = {"data.tokenizer": tokenizer_digest(str(file))}
    write_config(tmp_path, config, schedule=make_schedule("1f1b", pipe=1, num_microbatches=1), digests=digests)
    file.write_text('{\n "a": [1,   2]}\n')
    check_same_shapes(config, config, tmp_path)
    file.write_text('{"a": [2, 1, 3]}')
    with pytest.raises(CheckpointError, match=r"tokens of another tokenizer: what data\.tokenizer=.*t\.json names has"):
        check_same_shapes(config, config, tmp_path)
    check_same_shapes(config, replaced(config, {"data.tokenizer": "bytes"}), tmp_path)


@pytest.mark.parametrize("check", [check_same_run, check_same_shapes])
def test_weights_are_not_used_in_a_model_that_computes_something_else(check: Any, tmp_path: pathlib.Path) -> None:
    check(Config(), replaced(Config(), {"model.init_std": 1e-3}), tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layer_norm_epsilon is 0\.001, was 1e-05"):
        check(Config(), replaced(Config(), {"model.layer_norm_epsilon": 1e-3}), tmp_path)
