"""Which process of a run is slow, from the figures of all."""

import json
import pathlib
from typing import Any

import jax
import pytest

from fiddlex.cluster import processes
from fiddlex.config import Config
from fiddlex.train.run.records.slow_ranks import FIGURES, SlowRanks, find_slow
from tests.cluster.pods import run_pod
from tests.cluster.test_processes import as_flags, make_config
from tests.programs import EXPERIMENTS

USUAL = {"step_time_s": 1.0, "host_time_s": 0.1, "data_wait_s": 0.05, "device_probe_s": 0.1}

# train.py, whose loader takes a second for each batch on rank 1.
SLOW_LOADER = """
import runpy, sys, time
from fiddlex.train.step.feed import Feed
original = Feed.train
def train(self, start_step):
    for batch in original(self, start_step):
        time.sleep(1.0)
        yield batch
if "--process_id=1" in sys.argv:
    Feed.train = train
runpy.run_path({program!r}, run_name="__main__")
"""


def found(*others: dict[str, float], usual: int = 3) -> list[tuple[int, str]]:
    figures = [USUAL] * usual + [USUAL | other for other in others]
    return [(each.rank, each.respect) for each in find_slow(dict(enumerate(figures)))]


def test_a_figure_is_off_by_more_than_a_quarter() -> None:
    assert not found({})
    assert found({"host_time_s": 0.36}) == [(3, "host")]
    assert found({"data_wait_s": 0.31}) == [(3, "host")]
    assert found({"host_time_s": 0.22, "data_wait_s": 0.19}) == [(3, "host")]  # together
    assert not found({"host_time_s": 0.34})  # less than a quarter of the step
    assert found({"device_probe_s": 0.126}) == [(3, "devices")]
    assert not found({"device_probe_s": 0.124})
    assert found({"step_time_s": 1.26}) == [(3, "steps")]
    assert not found({"step_time_s": 1.24})
    assert not found({"host_time_s": 0.0, "data_wait_s": 0.0, "device_probe_s": 0.001, "step_time_s": 0.1})  # faster


def test_one_of_two_can_be_slow_and_more_than_one_of_four() -> None:
    assert found({"host_time_s": 0.5}, usual=1) == [(1, "host")]
    assert found({"host_time_s": 0.5}, {"device_probe_s": 0.2}, usual=2) == [(2, "host"), (3, "devices")]
    (slow,) = find_slow({0: USUAL, 1: USUAL | {"data_wait_s": 0.4}})
    assert slow.text == (
        "Rank 1 is slow: in each step its host is busy for 100 ms and waits 400 ms for data; the median of the sum is "
        "150 ms, and a step takes 1.0 s."
    )


def test_a_rank_is_named_when_it_becomes_slow_and_not_while_it_stays_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    posted: dict[int, Any] = {}
    monkeypatch.setattr(processes, "num_processes", lambda: 2)
    monkeypatch.setattr(processes, "post", lambda name, value: posted.update({0: value}))
    monkeypatch.setattr(processes, "posted", lambda name: posted)
    ranks = SlowRanks(jax.devices()[0])
    own = {name: USUAL[name] for name in FIGURES[:3]}
    assert ranks.compare({"step": 10} | own) == {}  # rank 1 has not come to a log point
    probe_s = posted[0][0][1]["device_probe_s"]
    assert probe_s > 0
    last: list[Any] = [10, USUAL | {"device_probe_s": probe_s}]
    for step, host_s, expected in (
        *((20, 0.5, 0), (30, 0.6, 0), (40, 0.6, 1), (50, 0.1, 0), (60, 0.5, 0), (70, 0.1, 0), (80, 0.1, 0)),
        *((90, 0.5, 0), (100, 0.5, 0), (110, 0.5, 1), (120, 0.1, 0)),
    ):
        # Rank 1 shows the figures of a step when rank 0 has already come to the next log point.
        posted[1] = [last]
        caplog.clear()
        record = ranks.compare({"step": step} | own | {"host_time_s": 0.1 + step / 1000})
        assert len(caplog.messages) == expected, step
        assert all(text.startswith("Rank 1 is slow") for text in caplog.messages)
        own_host_s = 0.1 if last[0] == 10 else 0.1 + last[0] / 1000
        assert record["host_time_s_by_process"] == [own_host_s, last[1]["host_time_s"]]
        last = [step, USUAL | {"host_time_s": host_s, "device_probe_s": probe_s}]
    posted[1] = [[100, USUAL], [130, USUAL]]
    assert ranks.compare({"step": 140} | own) == {}  # no log point of both


def test_one_process_compares_nothing() -> None:
    assert SlowRanks(jax.devices()[0]).compare({"step": 1} | USUAL) == {}


@pytest.mark.long
def test_a_rank_whose_loader_is_slow_is_named(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain.py").write_text("from fiddlex.config import Config as get_config\n")
    (tmp_path / "slow.py").write_text(SLOW_LOADER.format(program=str(EXPERIMENTS / "train.py")))
    config = make_config(tiny_config, "2x1x2", {"train.num_steps": 15, "train.log_every": 3, "train.eval_every": 0})
    flags = [f"--config={tmp_path / 'plain.py'}", *as_flags(config), f"--workdir={tmp_path / 'pod'}"]
    ended = run_pod(2, 2, tmp_path / "slow.py", *flags)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert ended[0].stderr.count("Rank 1 is slow: in each step its host is busy for") == 1
    assert "Rank 0 is slow" not in ended[0].stderr
    records = map(json.loads, (tmp_path / "pod" / "metrics.jsonl").read_text().splitlines())
    last = [record for record in records if "loss" in record][-1]
    assert last["data_wait_s_by_process"][1] > 0.3
    assert last["data_wait_s_by_process"][0] < 0.1
    assert all(len(last[f"{name}_by_process"]) == 2 for name in FIGURES)
