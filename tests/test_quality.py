"""The tables of experiments.quality."""

import dataclasses

import pytest

from experiments.quality_results import QualityCase, Records, batch_time, best_table, equal_time_table, gap_table, table

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


def test_losses_are_means_over_seeds_against_those_of_sync_at_the_same_rate() -> None:
    rows = table(RESULTS).splitlines()[2:]
    assert rows[0] == "| gpt_4x64 | 500 | 0.01 | 50 | adamw 0.9, sync | 2 | 2.1000 | 2.0000 | 2.2000 | +0.00% |  |"
    assert rows[1].endswith("| 0.01 | 50 | adamw 0.9, 2bw, momentum:2 | 1 | 2.3100 | 2.3100 | 2.3100 | +10.00% |  |")
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
        "| gpt_4x64 | 500 | adamw 0.9, sync | 0.01 | 2.1000 | +0.00% |",
        "| gpt_4x64 | 500 | adamw 0.9, 2bw, momentum:2 | 0.02 | 2.2050 | +5.00% |",
    ]


def test_equal_times_are_those_of_the_lockstep_clock() -> None:
    assert batch_time("sync", 500, 8, 16) / batch_time("2bw", 500, 8, 16) == pytest.approx(23 / 16)
    assert batch_time("sync:0.5,2bw", 500, 8, 8) == pytest.approx((15 + 11) / 2 * 3)  # F, I and W
    rows = equal_time_table(RESULTS).splitlines()[2:]
    assert [row.split(" | ")[1:3] + row.split(" | ")[5:] for row in rows] == [
        ["8", "16", "adamw 0.9, 2bw, momentum:2 at 0.02, 719 steps", "1.9950", "-5.00% |"],
        ["8", "8", "adamw 0.9, 2bw, momentum:2 at 0.02, 682 steps", "2.0370", "-3.00% |"],
    ]
