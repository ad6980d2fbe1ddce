"""The table that a workdir keeps: runs go on, and are evaluated, without the schedule's source, and run none of it."""

import dataclasses
import functools
import json
import pathlib

import pytest

from fiddlex.config import Config
from fiddlex.config.overrides import override
from fiddlex.errors import ConfigError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.text import to_csv
from fiddlex.train import loop
from fiddlex.train.run.transfer.result import load_generator
from fiddlex.train.run.workdir import read_config, write_config
from fiddlex.train.trainer import load_trainer

FUNCTION = """
from fiddlex.schedules.schedule import Action, Kind, Schedule, alternate


def half(*, pipe, chunks=1, num_microbatches):
    rows = []
    for rank in range(pipe):
        forwards, backwards = ([Action(rank, kind, k) for k in range(num_microbatches)] for kind in (Kind.F, Kind.B))
        rows.append(alternate(forwards, backwards, warmup=(pipe - rank) // 2))
    return Schedule("half", rows, placement=list(range(pipe)))
"""
NAME = "half_1f1b"


def half_1f1b(*, pipe: int, chunks: int = 1, num_microbatches: int, strict: bool = False) -> Schedule:
    schedule = GENERATORS["1f1b"](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    return dataclasses.replace(schedule, strict=strict)


@pytest.fixture
def config(tiny_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Config:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION)
    tiny_config.mesh.pipe, tiny_config.pipeline.num_microbatches = 2, 4
    tiny_config.pipeline.schedule = "mine.py:half"
    tiny_config.train.num_steps, tiny_config.train.checkpoint_every = 2, 2
    return tiny_config


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GENERATORS, NAME, half_1f1b)


def saved(workdir: pathlib.Path) -> str:
    """`pipeline.schedule` in the workdir's config.json."""
    schedule: str = json.loads((workdir / "config.json").read_text())["pipeline"]["schedule"]
    return schedule


def test_a_function_may_go_once_a_run_has_begun(
    config: Config, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fiddlex")
    run = tmp_path / "run"
    loop.train(config, run)
    order = "pipeline.order=auto: each rank runs one action a tick, in the schedule's order; with pipeline.order=ahead,"
    assert f"{order} F and B share ticks" in caplog.messages
    table = to_csv(make_schedule("mine.py:half", pipe=2, num_microbatches=4))
    assert ((run / "schedule.csv").read_text(), saved(run)) == (table, "mine.py:half")

    (tmp_path / "mine.py").unlink()
    moved = run.rename(tmp_path / "moved")
    trainer = load_trainer(moved)
    assert (trainer.config.pipeline.schedule, trainer.step) == (f"file:{moved}/schedule.csv", 2)
    assert to_csv(trainer.layout.pipeline.lowered.schedule) == table
    assert trainer.evaluate()["eval_loss"] > 0
    assert load_generator(moved)[1] == 2
    with pytest.raises(ConfigError, match=r"set mesh\.pipe=2 \(not 1\), or name a schedule that exists for any, such"):
        load_trainer(moved, lambda saved: override(saved, "mesh.pipe=1"))
    assert load_trainer(moved, lambda saved: override(saved, "mesh.pipe=1", "pipeline.schedule=1f1b")).step == 2

    for steps in (3, 4):  # the workdir still tells of the function
        config.train.num_steps = steps
        caplog.clear()
        assert loop.train(config, moved).step == steps
        assert (
            f"pipeline.schedule=mine.py:half: {tmp_path}/mine.py is not there. The run goes on with the table that it "
            f"has kept, {moved}/schedule.csv."
        ) in caplog.messages
        assert saved(moved) == "mine.py:half"
    config.pipeline.schedule = "other.py:half"
    with pytest.raises(
        ConfigError, match=r"other\.py cannot be read \(No such file or directory\)\. Did you mean|Give"
    ):
        loop.train(config, moved)


def test_another_table_of_the_same_function_is_told(
    config: Config, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    loop.train(config, run)
    earlier = (run / "schedule.csv").read_text()
    config.train.num_steps = 3
    loop.train(config, run)
    assert not list(run.glob("schedule-*.csv"))  # nothing has changed
    (tmp_path / "mine.py").write_text(FUNCTION.replace("(pipe - rank) // 2", "pipe - rank"))
    config.train.num_steps = 4
    loop.train(config, run)
    (copy,) = run.glob("schedule-*.csv")
    assert (
        "The schedule's table has changed since this run was last started: position 2 of rank 0 is 0F2, and was 0B0. "
        f"The run goes on with the new table. To go on with the earlier one, set pipeline.schedule=file:{copy}."
    ) in caplog.messages
    assert copy.read_text() == earlier != (run / "schedule.csv").read_text()


@pytest.mark.parametrize(
    ("order", "pipe"),
    [
        ("strict", 2),
        ("ahead", 1),
        pytest.param("ahead", 2, marks=pytest.mark.long),
        pytest.param("strict", 1, marks=pytest.mark.long),
    ],
)
def test_a_registered_name_may_be_missing_in_another_process(
    order: str,
    pipe: int,
    config: Config,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(GENERATORS, NAME, functools.partial(half_1f1b, strict=order == "strict"))
    config.pipeline.schedule, config.mesh.pipe = NAME, pipe
    run = tmp_path / "run"
    loop.train(config, run)
    assert load_trainer(run).config.pipeline.schedule == NAME
    monkeypatch.delitem(GENERATORS, NAME)
    trainer = load_trainer(run)
    assert (trainer.config.pipeline.schedule, trainer.config.pipeline.order) == (f"file:{run}/schedule.csv", order)
    assert trainer.evaluate()["eval_loss"] > 0
    config.train.num_steps = 3
    assert loop.train(config, run).step == 3
    assert read_config(run).pipeline.order == order  # that of the earlier steps, though the config has `auto`
    assert (
        f"pipeline.schedule={NAME}: no schedule has this name here. The run goes on with the table that it has kept, "
        f"{run}/schedule.csv."
    ) in caplog.messages
    config.pipeline.schedule = f"{NAME}_"
    with pytest.raises(ConfigError, match="there is no schedule 'half_1f1b_'"):
        loop.train(config, run)


def test_a_schedule_that_fiddlex_comes_with_keeps_its_name(config: Config, tmp_path: pathlib.Path) -> None:
    config.pipeline.schedule = "1f1b"
    run = tmp_path / "run"
    schedule = make_schedule("1f1b", pipe=2, num_microbatches=4)
    run.mkdir()
    write_config(run, config, schedule=schedule)
    assert (run / "schedule.csv").read_text() == to_csv(schedule)
    assert read_config(run).pipeline.schedule == "1f1b"
    write_config(run, config, schedule=make_schedule("1f1b", pipe=2, num_microbatches=8))
    assert not list(run.glob("schedule-*.csv"))  # its name makes the earlier one again


@pytest.mark.parametrize("has_table", [True, False])
def test_no_function_that_a_workdir_names_is_run(
    has_table: bool, config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, marker = tmp_path / "run", tmp_path / "was_run"
    loop.train(config, run)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(marker)!r}, 'w').close()\n{FUNCTION}")
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace("mine.py:half", f"{evil}:half"))
    if not has_table:
        (run / "schedule.csv").unlink()
        with pytest.raises(ConfigError, match=r"schedule\.csv cannot be read"):
            load_trainer(run)
    else:
        assert load_trainer(run).evaluate()["eval_loss"] > 0
        assert load_generator(run)[1] == 2
        config.train.num_steps = 3
        assert loop.train(config, run).step == 3  # the user names another function
    assert not marker.exists()
    make_schedule(f"{evil}:half", pipe=2, num_microbatches=4)
    assert marker.exists()  # so the test would have seen it
