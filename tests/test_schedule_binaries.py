"""`experiments/schedule.py` and `bubbles.py` as a user runs them: text, and the papers' numbers."""

import json
import re

import pytest

from tests import programs
from tests.programs import ROOT, Ended
from tests.test_own_schedules import FUNCTION

BINARY = ROOT / "experiments" / "schedule.py"


def call(*arguments: str, status: int = 0, program="schedule", cwd="/") -> Ended:
    return programs.call(program, *arguments, status=status, strict=True, cwd=cwd)


def sizes(name, pipe, chunks, microbatches):
    return [f"--name={name}", f"--pipe={pipe}", f"--chunks={chunks}", f"--microbatches={microbatches}"]


BUBBLE = (
    "bubble: the time of a batch beyond the work of the busiest rank, divided by that work; free-running, it is the "
    "longest from a rank's first action to its last; in lockstep, it is the makespan"
)
TEXT = f"""\
zb_h1: pipe=2, chunks=1, microbatches=3

free-running, each action in one slot:
rank  0   1   2   3   4   5   6   7   8   9
   0 0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0I2 0W2
   1  .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

lockstep, 10 ticks:
rank  0   1   2   3   4   5   6   7   8   9
   0 0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0I2 0W2
   1  .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

costs, in any unit: forward=2,backward_input=2,backward_weight=2,hop=0,embed=0,head=0,embed_backward=0
{BUBBLE}

free-running: makespan 20, bubble 0.1111 of the work: a batch takes 20, the busiest rank works 18
  most activations held by each rank, in microbatches of the whole rank: 2 2
  most left for W by each rank, in microbatches of the whole rank: 1 2

lockstep: makespan 20, bubble 0.1111 of the work: a batch takes 20, the busiest rank works 18
  most activations held by each rank, in microbatches of the whole rank: 2 2
  most left for W by each rank, in microbatches of the whole rank: 1 2
"""


def test_text():
    assert call(*sizes("zb_h1", 2, 1, 3), "--costs=forward=2,backward_input=2,backward_weight=2").stdout == TEXT


GOING_ON = """
sync, flushed, lockstep, the ticks of the first step:
rank    0       1       2       3
   0   0F0     0F1     0B0     0B1
   1    .    1F0+1B0 1F1+1B1    .
  the first step takes 4 ticks, 9 long; then a batch takes 4 ticks, 9 long, bubble 0.5 of the work
  versions of the weights: 1; forward passes of a stage stashed at most: 2

2bw, from batch to batch, lockstep, the ticks of the first 2 steps:
rank    0       1       2       3       4       5
   0   0F0     0F1   0F2+0B0 0F3+0B1 0F4+0B2 0F5+0B3
   1    .    1F0+1B0 1F1+1B1 1F2+1B2 1F3+1B3 1F4+1B4
  the first step takes 4 ticks, 10 long; then a batch takes 2 ticks, 6 long, bubble 0 of the work
  versions of the weights: 2; forward passes of a stage stashed at most: 3
"""


COMPARISON = """\
                                        |            free-running            |              lockstep
schedule              p   v    m  ticks |  makespan  bubble in flight  for W |  makespan  bubble in flight  for W
1f1b                  4   1    8     14 |        33   0.375         4      0 |        33   0.375         7      0
interleaved_1f1b@2    4   2    8     26 |      28.5  0.1875       5.5      0 |      28.5  0.1875       5.5      0
zb_v                  4   2    8     51 |      25.5       0         4    3.5 |      25.5  0.0625         4    3.5
1f1c               there is no schedule '1f1c'. Did you mean '1f1b'?

p, v, m: ranks, chunks (the most stages on a rank), microbatches
bubble: the time of a batch beyond the work of the busiest rank, divided by that work; free-running, it is the
  longest from a rank's first action to its last; in lockstep, it is the makespan
in flight: the most activations that a rank holds; for W: the most that a rank keeps from I to W; both in
  microbatches of the whole rank, on the rank with most
costs, in any unit; a single forward or backward time is that of all stages of a rank together:
  forward=1,backward_input=1,backward_weight=1,hop=0,embed=0,head=0,embed_backward=0
"""
COMPARE = ("--compare=1f1b,interleaved_1f1b@2,zb_v,1f1c", "--pipe=4", "--microbatches=8")


def test_text_of_a_comparison():
    assert call(*COMPARE).stdout == COMPARISON
    assert "\n".join(COMPARISON.splitlines()[:5]) in (ROOT / "docs" / "pipeline.md").read_text()


@pytest.mark.parametrize(
    ("picture", "flags"),
    [
        ("1f1b", ("--name=1f1b",)),
        ("compared", ("--compare=1f1b,interleaved_1f1b@2,zb_v", "--clock=lockstep")),
    ],
)
def test_pictures_of_the_docs_are_what_the_program_draws(picture, flags, tmp_path):
    call(*flags, "--pipe=4", "--microbatches=8", f"--output={tmp_path}/a.svg")
    # All words and numbers, whatever else another release of matplotlib writes differently.
    texts = [
        re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
        for path in (tmp_path / "a.svg", ROOT / "docs" / "pictures" / f"{picture}.svg")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 100


def test_json_of_a_comparison():
    facts = json.loads(call(*COMPARE, "--format=json", "--costs=forward=2").stdout)
    assert f"bubble: {facts['bubble']}" == BUBBLE
    rows = {row["name"]: row for row in facts["schedules"]}
    assert list(rows) == ["1f1b", "interleaved_1f1b@2", "zb_v", "1f1c"]
    assert rows["1f1c"] == {"name": "1f1c", "error": "there is no schedule '1f1c'. Did you mean '1f1b'?"}
    alone = json.loads(call(*sizes("1f1b", 4, 1, 8), "--format=json", "--costs=forward=2").stdout)
    assert rows["1f1b"] | {"bubble": facts["bubble"]} == alone | {"costs": rows["1f1b"]["costs"]}
    assert rows["zb_v"]["chunks"] == 2
    assert rows["zb_v"]["costs"].startswith("forward=1,backward_input=0.5,backward_weight=0.5,hop=0,")


def test_a_picture_of_a_comparison_tells_what_it_lacks(tmp_path):
    done = call(*COMPARE, "--clock=lockstep", f"--output={tmp_path}/three.svg")
    assert done.stdout == ""
    missing = "--compare=1f1c is not in the picture: there is no schedule '1f1c'. Did you mean '1f1b'?"
    assert done.stderr.splitlines() == [missing, f"{tmp_path}/three.svg is written."]
    text = (tmp_path / "three.svg").read_text()
    assert ">p = 4 ranks, m = 8 microbatches<" in text
    assert (
        ">interleaved_1f1b@2, lockstep, v = 2 chunks: makespan 28.5, bubble 18.8% of the work, at most 5.5 in" in text
    )
    assert "free-running" not in text


def test_a_comparison_takes_tables_and_says_when_there_is_nothing_to_compare(tmp_path):
    (tmp_path / "mine@2.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    done = call("--compare=file:mine@2.csv,1f1b", cwd=tmp_path)
    assert "\nfile:mine@2.csv    2   1    2 " in done.stdout
    assert "\n1f1b            schedule 1f1b needs --pipe and --microbatches; only a table has its own.\n" in done.stdout
    done = call("--compare=1f1c,zb_v@3", "--pipe=2", "--microbatches=2", status=2)
    assert done.stderr.startswith("schedule.py: there is no schedule '1f1c'.")
    assert "set --chunks=2 (not 3)" in done.stderr


def found(*flags):
    return json.loads(call("--name=auto", "--pipe=4", "--microbatches=8", *flags, "--format=json").stdout)


def test_the_schedule_found_holds_no_more_than_its_cap_and_is_a_table_like_any_other(tmp_path):
    facts = found("--chunks=2", "--cap=3")
    assert max(facts["lockstep"]["peak_inflight"]) <= 3
    assert facts["found"]["time"] == facts["lockstep"]["makespan"] <= 6 * 8 + 3 * 4 - 7  # V-Half
    assert facts["found"]["bound"] <= facts["found"]["time"]
    flags = ("--name=auto", "--pipe=4", "--microbatches=8", "--chunks=2", "--cap=3")
    call(*flags, "--clock=lockstep", "--costs=hop=0", f"--output={tmp_path}/auto.csv")
    again = json.loads(call(f"--name=file:{tmp_path}/auto.csv", "--format=json").stdout)
    assert again["lockstep"] == facts["lockstep"]
    assert "\n  found among " in call(*flags).stdout
    row = call("--compare=v_half,auto@2", "--pipe=4", "--microbatches=8", "--cap=3", "--format=json").stdout
    half, best = json.loads(row)["schedules"]
    assert best["lockstep"]["makespan"] <= half["lockstep"]["makespan"]


def test_the_clock_that_counts_is_the_one_that_is_shown():
    free, lockstep = (found(f"--clock={clock}")["found"]["time"] for clock in ("free_running", "lockstep"))
    assert (free, lockstep) == (24, 27)  # no bubble as ZB-H2, and p − 1 actions


def test_text_of_semantics():
    assert call(*sizes("1f1b", 2, 1, 2), "--semantics=2bw").stdout.endswith(GOING_ON)


@pytest.mark.parametrize(
    ("order", "ticks", "told"),
    [
        (
            "auto",
            12,
            "  delayed weights save no time here: a table is repeated for each batch, and each rank ends the order of "
            "one batch before it begins that of the next. With --order=ahead, forwards of the next batch share ticks "
            "with backwards. A name or a function makes one order for all batches.\n",
        ),
        ("ahead", 4, ""),
    ],
)
def test_a_table_without_a_flush_says_where_it_gains_nothing(order, ticks, told, tmp_path):
    table = f"--name=file:{tmp_path}/mine.csv"
    call(*sizes("1f1b", 3, 1, 4), "--format=csv", f"--output={tmp_path}/mine.csv")
    page = call(table, "--semantics=2bw", f"--order={order}").stdout
    assert f"; then a batch takes {ticks} ticks, " in page.splitlines()[-3 if told else -2]
    assert page.endswith(f"stashed at most: {3 if told else 5}\n{told}")


@pytest.mark.parametrize(("microbatches", "gains"), [(2, False), (3, True)])
def test_a_name_without_a_flush_says_that_more_microbatches_may_gain(microbatches, gains):
    page = call(*sizes("zb_v", 2, 2, microbatches), "--semantics=2bw").stdout
    told = (
        "  delayed weights save no time here: with 2 microbatches in a batch, neither one order for all batches nor "
        "the order of one batch repeated lets the next batch begin sooner. More microbatches in a batch may.\n"
    )
    assert page.endswith(told) != gains
    assert ("save no time" in page) != gains


def test_a_first_stage_without_a_delay_is_named_as_what_gains_nothing(tmp_path):
    rule = tmp_path / "late.py"
    rule.write_text("def late(*, num_stages, num_microbatches):\n    return tuple(range(num_stages))\n")
    page = call(*sizes("1f1b", 3, 1, 4), f"--semantics={rule}:late").stdout
    assert page.endswith(
        "  delayed weights save no time here: stage 0 has a delay of 0, so it begins a batch only after its last "
        "backward pass of the one before. Give it a delay of 1 or more.\n"
    )


def test_json_of_semantics():
    """2BW without a bubble takes the work alone, m(F + B), and a flush (m + p − 1)(F + B)."""
    facts = json.loads(call(*sizes("1f1b", 4, 1, 8), "--semantics=2bw", "--format=json").stdout)
    assert facts["semantics"] == {
        "sync": {"fill_ticks": 14, "fill": 33, "period_ticks": 14, "period": 33, "bubble_fraction": 0.375},
        "2bw": {"fill_ticks": 14, "fill": 36, "period_ticks": 8, "period": 24, "bubble_fraction": 0},
    }


def test_bubbles_of_semantics():
    rows = call("--semantics=2bw", "--pipe=4", program="bubbles").stdout.splitlines()
    assert rows[2] == "| 1f1b | 4 | 1 | 4 | 1.750 | 1.250 | 1.40 | 10 | 5 |"
    assert rows[5] == "| interleaved_1f1b | 4 | 2 | 8 | 1.188 | 1.000 | 1.19 | 26 | 16 |"


def test_text_of_one_clock():
    done = call("--name=1f1b", "--pipe=1", "--microbatches=2", "--clock=lockstep")
    assert done.stdout == (
        "1f1b: pipe=1, chunks=1, microbatches=2\n"
        "\n"
        "lockstep, 2 ticks:\n"
        "rank    0       1\n"
        "   0 0F0+0B0 0F1+0B1\n"
        "\n"
        "costs, in any unit: forward=1,backward_input=1,backward_weight=1,hop=0,embed=0,head=0,embed_backward=0\n"
        "bubble: the time of a batch beyond the work of the busiest rank, divided by that work; in lockstep, it is the "
        "makespan\n"
        "\n"
        "lockstep: makespan 6, bubble 0 of the work: a batch takes 6, the busiest rank works 6\n"
        "  most activations held by each rank, in microbatches of the whole rank: 1\n"
    )


def test_a_stash_on_the_host_is_drawn_with_its_copies():
    done = call("--name=1f1b", "--pipe=3", "--microbatches=5", "--stash_memory=host", "--semantics=2bw")
    assert "   0    .        .       ↑0F1     ↑0F2   ↑0F3↓0F1   ↓0F2     ↓0F3      .        ." in done.stdout
    assert "stashed at most on a device: 2; on the host: 3\n" in done.stdout
    assert "versions of the weights: 2; forward passes of a stage stashed at most: 2; on the host: 3\n" in done.stdout
    assert "host" not in call("--name=1f1b", "--pipe=2", "--microbatches=5", "--stash_memory=host").stdout


STREAMED = ("--name=breadth_first", "--pipe=1", "--chunks=3", "--microbatches=2", "--weights_memory=host")


def test_weights_on_the_host_are_drawn_with_their_transfers():
    done = call(*STREAMED, "--layers_per_chunk=2", "--clock=lockstep", "--costs=load=1.5,store=1")
    assert done.stdout == (
        "breadth_first: pipe=1, chunks=3, microbatches=2\n"
        "\n"
        "lockstep, 11 ticks:\n"
        "rank    0       1       2       3       4       5       6       7       8       9      10\n"
        "   0   0F0     0F1     1F0     1F1     2F0   2F1+2B0   2B1     1B0     1B1     0B0     0B1\n"
        "\n"
        "stages whose weights come from the host (↓) and whose gradients go to it (↑) beside the ticks from each "
        "column's number on:\n"
        "rank  0    1    2    3    4    5    6    7    8    9    10\n"
        "   0  ↓1   ↓1   ↓2   ↓2   .    .    .   ↓0↑2 ↓0↑2  ↑1   ↑1\n"
        "  before the first tick the weights of each rank's first stage come; after the last its gradients go\n"
        "  a transfer: 1 layer each way in 1 tick; in a batch each rank gets weights of 4 stages and sends gradients "
        "of 3; a device holds 2 stages of each\n"
        "\n"
        "costs, in any unit: forward=1,backward_input=1,backward_weight=1,hop=0,embed=0,head=0,embed_backward=0,"
        "load=1.5,store=1\n"
        "bubble: the time of a batch beyond the work of the busiest rank, divided by that work; in lockstep, it is the "
        "makespan\n"
        "\n"
        # 5 forward passes wait 0.5 each, and 3 + 2 at the ends
        "lockstep: makespan 25.5, bubble 0.4167 of the work: a batch takes 25.5, the busiest rank works 18\n"
        "  most activations held by each rank, in microbatches of the whole rank: 2\n"
    )


def test_json_tells_what_crosses_the_link_of_the_host():
    done = call(*STREAMED, "--format=json", "--costs=load=3")
    facts = json.loads(done.stdout)
    assert facts["stream"] == {
        "layers_per_transfer": 1,
        "ticks_per_period": 2,
        "num_periods": 6,
        "chunks_held": 2,
        "weight_chunks_per_batch": 4,
        "gradient_chunks_per_batch": 3,
    }
    assert (facts["free_running"]["makespan"], facts["lockstep"]["makespan"]) == (18, 18 + 3 + 3)
    assert "stream" not in json.loads(call(*STREAMED[:4], "--format=json").stdout)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--name=1f1b",), "--weights_memory=host: schedule 1f1b has 1 chunk on rank 0: "),
        (("--name=interleaved_1f1b", "--chunks=3"), "--weights_memory=host: schedule interleaved_1f1b is not chunk-"),
        (("--name=breadth_first", "--chunks=3", "--semantics=2bw"), "--weights_memory=host with --semantics=2bw: "),
        (("--name=1f1b", "--weights_memory=device", "--layers_per_chunk=2"), "--layers_per_chunk changes nothing "),
    ],
)
def test_weights_that_cannot_come_from_the_host_are_refused(flags, message):
    done = call("--pipe=2", "--microbatches=2", "--weights_memory=host", *flags, status=2)
    assert done.stderr.startswith(f"schedule.py: {message}")


@pytest.mark.parametrize(
    ("name", "chunks", "free_bubble", "lockstep_bubble", "free_peak", "lockstep_peak", "num_ticks"),
    [
        ("gpipe", 1, 3 / 8, 3 / 8, [8, 8, 8, 8], [8, 8, 8, 8], 21),
        ("1f1b", 1, 3 / 8, 3 / 8, [4, 3, 2, 1], [7, 5, 3, 1], 14),
        ("interleaved_1f1b", 2, 3 / 16, 3 / 16, [5.5, 4.5, 3.5, 2.5], [5.5, 4.5, 3.5, 2.5], 26),
    ],
)
def test_json_has_the_papers_numbers(name, chunks, free_bubble, lockstep_bubble, free_peak, lockstep_peak, num_ticks):
    costs = f"--costs=forward={1 / chunks},backward_input={1 / chunks},backward_weight={1 / chunks}"
    done = call(*sizes(name, 4, chunks, 8), costs, "--format=json")
    facts = json.loads(done.stdout.splitlines()[-1])
    assert (facts["name"], facts["pipe"], facts["chunks"], facts["microbatches"]) == (name, 4, chunks, 8)
    assert facts["num_ticks"] == num_ticks
    for clock, bubble, peak in (
        ("free_running", free_bubble, free_peak),
        ("lockstep", lockstep_bubble, lockstep_peak),
    ):
        assert facts[clock]["bubble_fraction"] == pytest.approx(bubble)
        assert facts[clock]["makespan"] == pytest.approx(24 * (1 + bubble))
        assert facts[clock]["peak_inflight"] == peak
        assert facts[clock]["peak_weight_stash"] == [0] * 4


def test_costs_may_differ_by_stage():
    costs = "--costs=forward=1:4,backward_input=1:2,backward_weight=0,hop=0.5"
    facts = json.loads(call(*sizes("1f1b", 2, 1, 3), costs, "--format=json").stdout)
    assert facts["free_running"]["makespan"] == 21  # 0F0, a hop, three times 4 + 2 on rank 1, a hop, 0B2
    # Ticks of 1+½, 4+2 three times (with the hops hidden beside 1F and 1B), and ½+1.
    assert facts["lockstep"]["makespan"] == 21


def test_a_table_travels(tmp_path):
    table = call(*sizes("zb_v", 3, 2, 5), "--format=csv").stdout
    assert table.splitlines()[0].startswith("0F0,0F1,")
    call(*sizes("zb_v", 3, 2, 5), "--format=csv", f"--output={tmp_path / 'mine.csv'}")
    assert (tmp_path / "mine.csv").read_text() == table
    by_name = json.loads(call(*sizes("zb_v", 3, 2, 5), "--format=json").stdout)
    by_file = json.loads(call("--name=file:mine.csv", "--format=json", cwd=tmp_path).stdout)
    assert by_file == by_name | {"name": "file:mine.csv"}


def test_what_was_skipped_in_a_table_is_told_in_the_text_alone(tmp_path):
    table = ROOT / "tests" / "schedules" / "overlapped.csv"
    header, skipped, pairs, empty = call(f"--name=file:{table}").stdout.splitlines()[:4]
    assert header.endswith("overlapped.csv: pipe=2, chunks=2, microbatches=4")
    assert skipped.startswith("  skipped, since they follow from the order: 32 sends and receives, ")
    assert pairs == "  overlapped pairs read as a forward and then a backward: 6"
    assert empty == ""
    for by_name, by_file in (
        (["--format=json"], ["--format=json"]),
        (["--format=json", "--order=ahead"], ["--format=json", "--order=ahead"]),
        (["--format=csv"], ["--format=csv"]),
    ):
        by_name = call("--name=dual_pipe_v", "--pipe=2", "--microbatches=4", *by_name).stdout
        by_file = call(f"--name=file:{table}", *by_file).stdout
        assert by_file.replace(f"file:{table}", "dual_pipe_v") == by_name


def test_zb_v_has_two_chunks_unasked():
    facts = json.loads(call("--name=zb_v", "--pipe=2", "--microbatches=3", "--format=json").stdout)
    assert facts["chunks"] == 2


def test_all_sizes_in_which_the_flags_differ_from_a_table_are_told(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    done = call(*sizes("file:mine.csv", 4, 1, 8), status=2, cwd=tmp_path)
    assert done.stderr.endswith(
        "--pipe=2 (not 4), --microbatches=2 (not 8), or name a schedule that exists for any, such as 1f1b.\n"
    )


def test_bubbles_of_semantics_are_of_the_sizes_that_flags_give():
    flags = ("--semantics=2bw", "--pipe=4", "--schedule=interleaved_1f1b", "--chunks=3", "--microbatches=8")
    facts = json.loads(call(*flags, "--format=json", program="bubbles").stdout)
    assert [(row["chunks"], row["microbatches"]) for row in facts["rows"]] == [(3, 8)]
    done = call("--semantics=2bw", "--schedule=zb_h1", "--chunks=3", "--microbatches=7", program="bubbles", status=2)
    assert "schedule zb_h1 has other sizes: set --chunks=1 (not 3)." in done.stderr


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        (["--schedule=v_half", "--pipe=2"], "| v_half | 2 | 2 | 8 |  | 0.0000 | 0.0208 | 49 | 2 | 2 |"),
        (["--pipe=2", "--chunks=2"], "| v_half | 2 | 2 | 8 |  | 0.0000 | 0.0208 | 49 | 2 | 2 |"),
        (["--schedule=zb_h2", "--pipe=8"], "| zb_h2 | 8 | 1 | 8 |  | 0.2917 | 0.4167 | 34 | 8 | 8 |"),
    ],
)
def test_bubbles_where_a_formula_does_not_hold_are_those_of_both_clocks(flags, row):
    done = call(*flags, "--microbatches=8", program="bubbles")
    assert row in done.stdout.splitlines()
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("flags", "rows", "told"),
    [
        (["--pipe=4", "--microbatches=7"], ["| 1f1b | 4 | 1 | 7 | 1.429 | 1.000 | 1.43 | 13 | 7 |"], ""),
        (
            ["--pipe=2", "--pipe=4", "--microbatches=6", "--schedule=interleaved_1f1b"],
            ["| interleaved_1f1b | 2 | 1 | 6 | 1.167 | 1.000 | 1.17 | 8 | 6 |"],
            "--schedule=interleaved_1f1b: left out at 1 size, the last since: interleaved_1f1b with pipe=4, ",
        ),
    ],
)
def test_bubbles_of_semantics_leave_out_schedules_that_do_not_exist(flags, rows, told):
    done = call("--semantics=2bw", *flags, program="bubbles")
    assert done.stdout.splitlines()[2:] == rows
    assert done.stderr.startswith(told)
    assert bool(done.stderr) == bool(told)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schedule=zb_h1", "--chunks=3"], "schedule zb_h1 has other sizes: set --chunks=1 (not 3)."),
        (["--schedule=interleaved_1f1b", "--pipe=4"], "interleaved_1f1b with pipe=4, num_microbatches=7: "),
        (["--semantics=2bw", "--pipe=4", "--chunks=2"], "interleaved_1f1b with pipe=4, num_microbatches=7: "),
    ],
)
def test_bubbles_of_a_schedule_that_exists_at_no_size_are_refused_with_its_rule(flags, message):
    done = call(*flags, "--microbatches=7", program="bubbles", status=2)
    assert done.stderr.removeprefix("bubbles.py: ").startswith(message)
    assert done.stdout == ""


def test_bubbles_of_what_is_found_lie_between_the_bound_and_the_names():
    table = call("--found", "--pipe=4", "--chunks=2", "--microbatches=8", program="bubbles").stdout.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[:-2]]
    assert table[-2:] == ["", BUBBLE]
    assert rows[0][-2:] == ["found, lockstep", "lower bound"]
    by_name = {row[0]: (float(row[6]), *map(float, row[-2:])) for row in rows[2:]}
    assert set(by_name) == {"interleaved_1f1b", "breadth_first", "zb_v", "v_half", "v_min", "dual_pipe_v"}
    assert all(bound <= best <= bubble for bubble, best, bound in by_name.values())
    assert by_name["v_half"][1] == by_name["v_half"][0]
    assert by_name["dual_pipe_v"][1] < by_name["dual_pipe_v"][0]
    done = call("--found", "--semantics=2bw", program="bubbles", status=2)
    assert "and --semantics is about others: leave one out." in done.stderr


def test_bubbles_of_the_free_running_clock_are_the_formulas():
    arguments = ["--pipe=3", "--pipe=16", "--microbatches=48", "--microbatches=128"]
    lines = call(*arguments, program="bubbles").stdout.splitlines()[:-2]
    header, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert header == [
        *("schedule", "p", "v", "m", "formula", "free-running", "lockstep", "ticks", "held, free", "held, lockstep")
    ]
    assert set(rule) == {"---"}
    assert all(row[4] == row[5] for row in rows)
    assert {tuple(row[:4]) for row in rows if row[1] == "3"} == {
        *((name, "3", "1", m) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2") for m in ("48", "128")),
        *((name, "3", "2", m) for name in ("zb_v", "v_half", "v_min", "dual_pipe_v") for m in ("48", "128")),
        *(("interleaved_1f1b", "3", str(v), "48") for v in range(1, 5)),  # 128 is no multiple of 3
        *(("breadth_first", "3", str(v), m) for v in range(1, 5) for m in ("48", "128")),
    }
    assert ["1f1b", "16", "1", "128", "0.1172", "0.1172", "0.1172", "158", "16", "31"] in rows
    assert ["interleaved_1f1b", "16", "4", "128", "0.0293", "0.0293", "0.0293", "590", "19.75", "19.75"] in rows


SIZES = ["schedule", "pipe", "chunks", "microbatches"]
NUMBERS = ["formula", "free_running", "lockstep", "num_ticks", "held_free_running", "held_lockstep"]


OF_NUMBERS = [".4f", ".4f", ".4f", "", "g", "g"]


@pytest.mark.parametrize(
    ("flags", "names", "forms"),
    [
        (["--schedule=zb_h2", "--schedule=mine.py:eager"], NUMBERS, OF_NUMBERS),
        (["--schedule=zb_h2", "--found"], [*NUMBERS, "found", "bound"], [*OF_NUMBERS, ".4f", ".4f"]),
        (
            ["--semantics=2bw"],
            ["flush", "no_flush", "faster", "ticks_of_first_step", "ticks_of_a_batch"],
            [".3f", ".3f", ".2f", "", "g"],
        ),
    ],
)
def test_bubbles_in_json_are_those_of_the_table(flags, names, forms, tmp_path):
    """ZB-H2's two clocks differ, and a function of one's own has no formula."""
    (tmp_path / "mine.py").write_text(FUNCTION)
    flags = [*flags, "--pipe=3", "--microbatches=6"]
    lines = call(*flags, program="bubbles", cwd=tmp_path).stdout.splitlines()
    facts = json.loads(call(*flags, "--format=json", program="bubbles", cwd=tmp_path).stdout)
    rows = facts.pop("rows")
    beside = {"semantics": "2bw"} if "--semantics=2bw" in flags else {"bubble": BUBBLE.removeprefix("bubble: ")}
    assert facts == beside
    assert {tuple(row) for row in rows} == {(*SIZES, *names)}
    forms = ["", "", "", "", *forms]
    told = [
        ["" if cell is None else format(cell, form) for cell, form in zip(row.values(), forms, strict=True)]
        for row in rows
    ]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if line.startswith("|")]
    assert told == table
