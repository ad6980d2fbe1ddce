"""The tables of experiments.quality."""

import dataclasses
import json
import pathlib
import signal
from typing import Any

import pytest

from experiments.quality_pictures import draw, draw_rates
from experiments.quality_results import (
    QualityCase,
    Records,
    batch_time,
    best_table,
    equal_time_table,
    gap_table,
    parse_prediction,
    read,
    table,
)
from experiments.quality_runs import train
from fiddlex.cluster.peers import StopRequest
from fiddlex.errors import ConfigError

STUDIES = pathlib.Path(__file__).parents[1] / "docs/studies"
SYNC = QualityCase("gpt_4x64", "sync", 0, 500, 0.01, 0.9)
LAGGING = dataclasses.replace(SYNC, semantics="2bw", prediction="momentum:2")
TWICE = dataclasses.replace(LAGGING, learning_rate=0.02)


def of_loss(loss: float) -> Records:
    return [{"step": 250, "loss": 3.0}, {"step": 250, "eval_loss": 2 * loss}, {"step": 500, "eval_loss": loss}]


RESULTS = {
    SYNC: of_loss(2.0),
    dataclasses.replace(SYNC, seed=1): of_loss(2.2),
    LAGGING: of_loss(2.31),
    TWICE: of_loss(2.205),
    dataclasses.replace(TWICE, steps=719): of_loss(1.995),  # 500 · 23 / 16 to the nearest
    dataclasses.replace(TWICE, steps=682): of_loss(2.037),  # 500 · 15 / 11
    dataclasses.replace(TWICE, steps=681): of_loss(1.0),
}


@pytest.mark.parametrize("text", ["extrapolate:x", "extrapolate:", "extrapolate:1.5", "extrapolate:2:1:junk", "a:inf"])
def test_a_prediction_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form KIND, KIND:ORDER or KIND:ORDER:SCALE"):
        parse_prediction(text)


def test_predictions_are_parsed() -> None:
    assert parse_prediction("momentum") == ("momentum", 1, 1)
    assert parse_prediction("extrapolate:2:0.7") == ("extrapolate", 2, 0.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": 5}, "not a run"),
        ({"records": []}, "not a run"),
        ({"steps": 501}, "not a run (it ended at step 500 of 501)"),
        ({"seed": "0"}, "not a run (seed='0')"),
        ({"learning_rate": None}, "not a run (learning_rate=None)"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_damaged_runs_are_told(change: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.jsonl"
    run = dataclasses.asdict(SYNC) | {"records": of_loss(2.0)}
    path.write_text(json.dumps(run) + "\n" + json.dumps(run | change) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert message in str(raised.value)
    assert "line 2" in str(raised.value)


def test_pictures_are_drawn_in_the_formats_that_there_are(tmp_path: pathlib.Path) -> None:
    draw(RESULTS, tmp_path / "losses.svg")
    draw_rates(RESULTS, tmp_path / "rates.svg")
    assert (tmp_path / "rates.svg").stat().st_size > 1000
    with pytest.raises(ConfigError, match="the ending of a picture's name is its format"):
        draw(RESULTS, tmp_path / "losses.foo")
    with pytest.raises(ConfigError, match="Name a file in a folder that exists"):
        draw(RESULTS, tmp_path / "no/losses.svg")


def test_losses_are_means_held_against_those_of_sync_at_the_same_rate_and_seeds() -> None:
    rows = table(RESULTS).splitlines()[2:]
    assert rows[0] == "| gpt_4x64 | 500 | 0.01 | 50 | adamw 0.9, sync | 2 | 2.1000 | 2.0000 | 2.2000 | +0.00% |  |"
    assert rows[1].endswith("| 0.01 | 50 | adamw 0.9, 2bw, momentum:2 | 1 | 2.3100 | 2.3100 | 2.3100 | +15.50% |  |")
    assert rows[2].endswith("| 2.2050 |  |  |")  # no run with a flush at this rate


def test_gaps_are_those_of_the_seeds_that_both_have() -> None:
    rows = gap_table({case: records for case, records in RESULTS.items() if case.steps == 500}).splitlines()
    assert rows[0] == "| model | steps | optimizer | peak rate | warm-up | sync | 2bw, momentum:2 |"
    assert rows[2:] == [
        "| gpt_4x64 | 500 | adamw 0.9 | 0.01 | 50 | 2.1000 | 2.3100 (+15.5%) |",
        "| gpt_4x64 | 500 | adamw 0.9 | 0.02 | 50 |  | 2.2050 |",
    ]


def test_each_recipe_is_shown_at_its_best_rate() -> None:
    rows = best_table({case: records for case, records in RESULTS.items() if case.steps == 500}).splitlines()[2:]
    assert rows == [
        "| gpt_4x64 | 500 | adamw 0.9, sync | 0.01 | 2 | 2.1000 | +0.00% |",
        "| gpt_4x64 | 500 | adamw 0.9, 2bw, momentum:2 | 0.02 | 1 | 2.2050 | +10.25% |",
    ]


def test_equal_times_are_those_of_the_lockstep_clock() -> None:
    assert batch_time("sync", 500, 8, 16) / batch_time("2bw", 500, 8, 16) == pytest.approx(23 / 16)
    assert batch_time("sync:0.5,2bw", 500, 8, 8) == pytest.approx((15 + 11) / 2 * 3)  # F, I and W
    rows = equal_time_table(RESULTS).splitlines()[2:]
    assert [row.split(" | ")[1:3] + row.split(" | ")[5:] for row in rows] == [
        ["8", "16", "adamw 0.9, 2bw, momentum:2 at 0.02, 719 steps", "1.9950", "-0.25% |"],
        ["8", "8", "adamw 0.9, 2bw, momentum:2 at 0.02, 682 steps", "2.0370", "+1.85% |"],
    ]


def test_a_run_that_a_signal_stops_is_not_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from fiddlex.train import loop

    stopped = loop.Outcome(3, StopRequest(signal.SIGTERM, rank=0), None, None, "", None)
    monkeypatch.setattr(loop, "train", lambda config, workdir: stopped)
    with pytest.raises(SystemExit) as raised:
        train(SYNC)
    assert raised.value.code == 128 + signal.SIGTERM


def test_the_tables_of_the_docs_are_of_the_results() -> None:
    results = read(STUDIES / "prediction.jsonl")
    text = (STUDIES / "prediction.md").read_text(encoding="utf-8")
    assert all(made(results) in text for made in (table, gap_table, best_table, equal_time_table))
