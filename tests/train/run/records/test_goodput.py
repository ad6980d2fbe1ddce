"""How the wall time of a run was spent, its restarts included."""

import itertools
import json
import os
import pathlib
import signal
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import Config
from fiddlex.train import loop
from fiddlex.train.run.records import goodput
from fiddlex.train.run.records.goodput import LOSSES, Goodput, Interval, account, describe
from fiddlex.train.run.records.metrics import MetricsWriter
from fiddlex.train.step.stopwatch import Activity, Lap, Stopwatch
from tests.programs import call, started
from tests.small_run import CONFIG, small, steps


def interval(time_s: float, step: int, resumed_step: int | None = None, **seconds: float) -> Interval:
    return Interval(time_s, step, seconds, resumed_step)


def shares(record: dict[str, Any]) -> dict[str, float]:
    """The shares that are not 0, in seconds."""
    seconds = {kind: record[f"{kind}_share"] * record["wall_time_s"] for kind in LOSSES}
    return {kind: pytest.approx(value) for kind, value in seconds.items() if value}


def test_steps_that_are_taken_again_and_the_time_between_processes_are_lost() -> None:
    first = [
        interval(104, 0, 0, starting=3, compilation=1),
        interval(114, 10, steps=10),
        interval(115, 10, checkpoints=1),
        interval(135, 20, steps=16, data_wait=4),  # half of its steps are lost
        interval(136, 20, evaluation=1),
    ]
    second = [interval(150, 25, 15, starting=2, steps=10), interval(160, 30, steps=10)]
    record = account([*first, *second])
    assert (record["step"], record["wall_time_s"]) == (30, pytest.approx(60))
    assert record["goodput"] * 60 == pytest.approx(10 + 8 + 20)
    lost = {"starting": 5, "compilation": 1, "checkpoints": 1, "data_wait": 2, "evaluation": 1}
    assert shares(record) == lost | {"restarts": 2, "repeated": 8 + 2}
    # A third process begins before what the second one has done: of both, what came after is lost.
    third = [interval(170, 12, 5, steps=10)]
    record = account([*first, *second, *third])
    assert record["goodput"] * 70 == pytest.approx(5 + 10)
    assert describe(record).startswith("21.4% of 1 min 10 s; ")


def test_time_after_the_end_does_not_count() -> None:
    ended = interval(110, 5, 0, steps=10)._replace(ended=True)
    later = interval(100_010, 10, 5, steps=10)
    assert account([ended, later])["goodput"] == 1
    assert account([ended._replace(ended=False), later])["goodput"] == pytest.approx(20 / 99_910)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 3), st.booleans()), min_size=1),
    st.floats(0.5, 50),
)
def test_all_shares_add_up_to_1(lines: list[tuple[int, int, int, bool]], length_s: float) -> None:
    now, step, intervals = 1000.0, 0, []
    for resumed, taken, gap, restarts in lines:
        starts = restarts or not intervals
        step = min(resumed, step) + taken if starts else step + taken
        now += length_s + (gap if starts else 0)
        seconds = {"steps": length_s / 2, "data_wait": length_s / 2}
        intervals.append(Interval(now, step, seconds, step - taken if starts else None))
    record = account(intervals)
    assert record["goodput"] + sum(record[f"{kind}_share"] for kind in LOSSES) == pytest.approx(1)
    assert all(value >= 0 for value in record.values())
    assert record["wall_time_s"] == pytest.approx(now - intervals[0].start_s)


def test_every_moment_has_one_activity() -> None:
    start_s = time.monotonic() - 5
    watch = Stopwatch(start_s)
    lap = Lap(watch)
    with watch.measure(Activity.EVALUATION), watch.measure(Activity.CHECKPOINTS):
        time.sleep(0.02)
        watch.move(0.01, Activity.CHECKPOINTS, Activity.STARVED)
    watch.begin(Activity.HOST)
    first, second = lap.take(), lap.take()
    assert first[Activity.STARTING] >= 5
    assert first[Activity.CHECKPOINTS] >= 0.01
    assert first[Activity.STARVED] == pytest.approx(0.01)
    assert first[Activity.EVALUATION] < 0.01
    assert list(second) == list(Activity)
    assert sum(first.values()) + sum(second.values()) <= time.monotonic() - start_s
    assert sum(second.values()) == pytest.approx(second[Activity.HOST])


def test_a_line_that_a_kill_has_cut_short_does_no_harm(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "goodput.jsonl"
    with Goodput(tmp_path, Stopwatch(), resumed_step=0) as spent:
        assert spent.record() is None
        spent.write(2)
        spent.write(4)
    whole = path.read_text()
    for torn in ('{"time_s": 17', '{"time_s": 1, "step": 3, "seconds": 5}\n', "[]\n", '{"step": 3}\n', "\0\0\0"):
        path.write_text(whole + torn)
        with Goodput(tmp_path, Stopwatch(), resumed_step=4) as spent:
            assert path.read_text() == whole
            spent.write(5, ended=True)
            assert spent.record()["step"] == 5
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("resumed_step") for line in lines] == [0, None, 4]
        path.write_text(whole)


def test_a_run_that_starts_where_another_has_ended_has_an_account_of_its_own(tmp_path: pathlib.Path) -> None:
    for ended, lines in ((False, 1), (True, 2), (True, 1)):  # the first was killed before its first checkpoint
        with Goodput(tmp_path, Stopwatch(), resumed_step=0) as spent:
            spent.write(3, ended=ended)
        assert len((tmp_path / "goodput.jsonl").read_text().splitlines()) == lines


def test_the_record_of_goodput_stays_behind_when_a_run_goes_on(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, resumed_step=0) as writer:
        writer.write({"step": 2, "loss": 1.0})
        writer.write({"step": 2, "goodput": 0.5})
    with MetricsWriter(tmp_path, resumed_step=2) as writer:
        writer.write({"step": 3, "loss": 1.0})
    assert [json.loads(line) for line in writer.path.read_text().splitlines()] == [
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": 1.0},
    ]


def test_a_run_accounts_for_its_time(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    tiny_config.train.num_steps, tiny_config.train.eval_every, tiny_config.train.checkpoint_every = 4, 2, 2
    start_s = time.monotonic()
    outcome = loop.train(tiny_config, tmp_path)
    passed_s = time.monotonic() - start_s
    record = outcome.goodput
    assert record is not None
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]) == record
    assert record["wall_time_s"] == pytest.approx(passed_s, rel=0.05)
    for kind in ("compilation", "checkpoints", "evaluation", "starting"):
        assert record[f"{kind}_share"] > 0
    assert record["restarts_share"] == record["repeated_share"] == 0
    times = [json.loads(line)["time_s"] for line in (tmp_path / goodput.FILE).read_text().splitlines()]
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))
    assert loop.train(tiny_config, tmp_path).goodput == record  # it had nothing to do
    figures = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps_ = [each for each in figures if "loss" in each]
    assert all(each["data_wait_s"] >= 0 and 0 < each["host_time_s"] < passed_s for each in steps_)


def test_a_killed_run_knows_what_the_kill_cost(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    fields = small(text_file, train_num_steps=10**5, train_checkpoint_every=20)
    arguments = [f"--config={CONFIG}", f"--workdir={tmp_path}", *(f"--config.{k}={v}" for k, v in fields.items())]
    start_s = time.time()
    with started("train", *arguments) as running:
        while max(steps(tmp_path), default=0) < 30:
            assert time.time() < start_s + 120
            time.sleep(0.05)
        os.kill(running.process.pid, signal.SIGKILL)
        running.wait(60)
    reached = max(steps(tmp_path))
    time.sleep(1)
    done = call("train", *arguments, f"--config.train.num_steps={reached + 3}", "--format=json")
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["goodput"] + sum(record[f"{kind}_share"] for kind in LOSSES) == pytest.approx(1)
    assert record["restarts_share"] * record["wall_time_s"] >= 1
    assert 0 < record["goodput"] < 1
    assert record["wall_time_s"] <= time.time() - start_s
    lines = map(json.loads, (tmp_path / goodput.FILE).read_text().splitlines())
    first, resumed = (line["resumed_step"] for line in lines if "resumed_step" in line)
    assert first == 0
    assert (record["repeated_share"] > 0) == (resumed < reached)


@pytest.mark.parametrize("name", ["time_s", "step", "resumed_step", "steps"])
@pytest.mark.parametrize("value", ["NaN", "1e400", "-1", "true", '"1"', "[]", "9" * 400, "9" * 5000, "[" * 100_000])
def test_a_line_that_no_run_writes_does_no_harm(name: str, value: str, tmp_path: pathlib.Path) -> None:
    fields = {"time_s": "1000.0", "step": "4", "resumed_step": "2"} | {name: value}
    seconds = value if name == "steps" else "3.0"
    whole = '{"time_s": 990.0, "step": 2, "seconds": {"steps": 5.0}, "resumed_step": 0}'
    odd = ", ".join(f'"{field}": {text}' for field, text in fields.items() if field != "steps")
    path = tmp_path / "goodput.jsonl"
    path.write_text(f'{whole}\n{{{odd}, "seconds": {{"steps": {seconds}}}}}\n')
    with Goodput(tmp_path, Stopwatch(), resumed_step=2) as goodput:
        record = goodput.record()
    assert path.read_text() == f"{whole}\n"
    assert record is not None
    assert (record["wall_time_s"], record["goodput"]) == (5.0, 1.0)
