"""What crosses between slices and hosts in compiled steps is what the planner counts, but for what it leaves out."""

import json
import pathlib
from typing import Any

import pytest

from experiments.slow_links import SlowCase, cases, compiled, planned, table
from tests.compiling import needs_cuda_plugin

STORED = pathlib.Path(__file__).parents[2] / "docs" / "studies" / "slow_links.jsonl"


def megabytes(result: dict[str, Any], *kinds: str) -> float:
    return sum(
        each["crossing_bytes"] * each["count"] / 1e6
        for each in result["collectives"]
        if not kinds or each["kind"] in kinds
    )


def test_the_table_in_the_docs_is_that_of_the_results() -> None:
    results = [json.loads(line) for line in STORED.read_text().splitlines()]
    by_case = {SlowCase(*each["case"]): each for each in results}
    assert list(by_case) == list(cases())
    assert table(by_case) in (STORED.parents[1] / "ahead_of_time.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_planner_names_the_axis_across(case: SlowCase) -> None:
    assert {each.axis for each in planned(case)} == {case.outermost}


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["tpu_v5e", pytest.param("h100", marks=needs_cuda_plugin)])
@pytest.mark.parametrize("outermost", ["data", "pipe"])
def test_a_compiled_step_sends_what_the_planner_counts(cluster: str, outermost: str) -> None:
    if cluster == "tpu_v5e":
        pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    case = SlowCase(cluster, "configs/gpt_tiny.py", outermost, "1f1b", 1)
    result = compiled(case)
    (traffic,) = planned(case)
    if outermost == "data":
        # XLA pads nothing of what it scatters and gathers; small sums of metrics come in addition.
        assert megabytes(result, "all-gather", "reduce-scatter", "all-reduce") == pytest.approx(
            traffic.bytes / 1e6, rel=0.1
        )
        assert not megabytes(result, "collective-permute")
    else:
        # Both hops of every tick are sent, also from idle ranks; the planner counts a microbatch's messages alone.
        config = case.config()
        activation = config.microbatch_size * config.model.seq_len * config.model.hidden_size * 4 / 1e6
        assert megabytes(result, "collective-permute") == pytest.approx(2 * result["num_ticks"] * activation)
        useful = config.pipeline.num_microbatches * activation
        assert megabytes(result, "all-reduce") == pytest.approx(traffic.bytes / 1e6 - useful, rel=0.1)
