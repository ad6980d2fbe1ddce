"""What crosses between slices and hosts in compiled steps is what the planner counts, but for what it leaves out."""

import json
import pathlib
from typing import Any

import pytest

from experiments.slow_link_cases import SlowCase, cases, compiled, planned, table
from tests.compiling import needs_cuda_plugin

STORED = pathlib.Path(__file__).parents[2] / "docs" / "studies" / "slow_links.jsonl"


def sent(result: dict[str, Any], *kinds: str) -> float:
    """Bytes that the busiest device sends across in collectives of these kinds."""
    return sum(each["bytes"] for each in result["crossing"] if each["kind"] in kinds)


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
def test_a_compiled_step_sends_what_the_planner_counts(
    cluster: str, outermost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu does not know the tests' own
    if cluster == "tpu_v5e":
        pytest.importorskip("libtpu", reason="compiling for TPUs takes libtpu, of the extra `aot`")
    case = SlowCase(cluster, "configs/gpt_tiny.py", outermost, "1f1b", 1)
    result = compiled(case)
    (traffic,) = planned(case)
    weights = ("all-gather", "reduce-scatter")
    if outermost == "data":
        # XLA for TPUs scatters between slices before it does inside them, so that twice as much crosses.
        gathered = traffic.bytes / 2
        expected = gathered + gathered * (2 if cluster == "tpu_v5e" else 1)
        assert sent(result, *weights) == pytest.approx(expected, rel=0.02)
        assert sent(result, "collective-permute") == 0
    else:
        # Both hops of every tick are sent, also from idle ranks; the planner counts messages of microbatches alone.
        config = case.config()
        activation = config.microbatch_size * config.model.seq_len * config.model.hidden_size * 4
        assert sent(result, "collective-permute") == pytest.approx(2 * result["num_ticks"] * activation)
        sums = traffic.bytes - config.pipeline.num_microbatches * activation
        # XLA for GPUs joins half of the sums with those over tensor, of which a device sends half as much.
        assert sent(result, "all-reduce") == pytest.approx(sums * (1 if cluster == "tpu_v5e" else 0.75), rel=0.02)
        assert sent(result, *weights) < 100  # of weights nothing crosses
