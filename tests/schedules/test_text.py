import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Action, Schedule
from fiddlex.schedules.text import copies_to_text, from_csv, stream_to_text, to_csv, to_text
from fiddlex.schedules.weight_stream import stream_weights
from tests.schedules.strategies import generated_schedules, user_schedules

GOLDEN = {
    ("gpipe", 3, 1, 3): """\
rank  0   1   2   3   4   5   6   7   8   9
   0 0F0 0F1 0F2  .   .   .   .  0B0 0B1 0B2
   1  .  1F0 1F1 1F2  .   .  1B0 1B1 1B2  .
   2  .   .  2F0 2F1 2F2 2B0 2B1 2B2  .   .
""",
    ("1f1b", 4, 1, 8): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21
   0 0F0 0F1 0F2 0F3  .   .   .  0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4  .  0B5  .  0B6  .  0B7
   1  .  1F0 1F1 1F2  .   .  1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5  .  1B6  .  1B7  .
   2  .   .  2F0 2F1  .  2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6  .  2B7  .   .
   3  .   .   .  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7  .   .   .
""",
    ("interleaved_1f1b", 2, 2, 4): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
   0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
   1  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .
""",
    ("zb_h1", 4, 1, 8): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22  23  24  25  26
   0 0F0 0F1 0F2 0F3  .   .   .  0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
   1  .  1F0 1F1 1F2  .   .  1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
   2  .   .  2F0 2F1  .  2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7
   3  .   .   .  3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7
""",
    ("zb_h2", 3, 1, 5): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16
   0 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4  .   .
   1  .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4  .
   2  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
""",
    ("dual_pipe_v", 2, 2, 4): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
   0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
   1  .  1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
""",
    ("zb_v", 2, 2, 4): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
   0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
   1  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
""",
    ("v_half", 3, 2, 4): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22  23  24  25  26  27  28
   0 0F0 0F1 0F2  .   .  5F0 5I0 5W0  .   .  5F1 5I1 0I0 5W1 0F3 0W0 5F2 5I2 0I1 5W2 0W1 5F3 5I3 0I2 5W3 0W2  .  0I3 0W3
   1  .  1F0 1F1 1F2 4F0  .   .  4I0 4W0 4F1 1I0 1W0 4I1 4W1 4F2 1F3 1I1 1W1 4I2 4W2 4F3  .  1I2 4I3 1W2 4W3 1I3 1W3  .
   2  .   .  2F0 3F0 2F1 3F1  .   .  3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2F3 2W1 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3  .
""",
    ("v_min", 3, 2, 3): """\
rank  0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21  22
   0 0F0 0F1 0F2  .   .  5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0  .   .  5F2 5I2 0I1 5W2 0W1  .  0I2 0W2
   1  .  1F0 1F1  .  4F0  .  4F1 4I0 4W0 1F2 1I0 1W0 4I1 4W1 4F2  .  1I1 4I2 1W1 4W2 1I2 1W2  .
   2  .   .  2F0 3F0 2F1 3F1  .   .  3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2  .
""",
}


@pytest.mark.parametrize(("name", "pipe", "chunks", "num_microbatches"), GOLDEN)
def test_printed_schedules(name, pipe, chunks, num_microbatches):
    schedule = make_schedule(name, pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    assert to_text(schedule) == GOLDEN[name, pipe, chunks, num_microbatches]


def test_spills_and_fetches_are_drawn_by_ticks():
    lowered = lower(make_schedule("1f1b", pipe=3, num_microbatches=5), spills=True)
    assert (
        to_text(lowered.schedule, lowered.ticks) + copies_to_text(lowered)
        == """\
rank    0       1       2       3       4       5       6       7       8
   0   0F0     0F1     0F2     0F3   0F4+0B0   0B1     0B2     0B3     0B4
   1    .      1F0     1F1   1F2+1B0 1F3+1B1 1F4+1B2   1B3     1B4      .
   2    .       .    2F0+2B0 2F1+2B1 2F2+2B2 2F3+2B3 2F4+2B4    .       .
rank    0        1        2        3        4        5        6        7        8
   0    .        .       ↑0F1     ↑0F2   ↑0F3↓0F1   ↓0F2     ↓0F3      .        .
   1    .        .        .     ↑1F1↓1F1 ↑1F2↓1F2 ↑1F3↓1F3    .        .        .
   2    .        .        .        .        .        .        .        .        .
"""
    )


def test_weights_and_gradients_on_their_way_are_drawn_by_periods():
    lowered = lower(make_schedule("breadth_first", pipe=2, chunks=3, num_microbatches=4))
    assert (
        stream_to_text(lowered, stream_weights(lowered, rows_per_chunk=2))
        == """\
rank  0    2    4    6    8    10   12   14   16   18   20   22   24
   0  ↓2   ↓2   ↓4   ↓4   .    .    .    .    ↓0  ↓0↑4  ↑4   ↑2   ↑2
   1  ↓3   ↓3   ↓5   ↓5   .    .    .    .   ↓1↑5 ↓1↑5  ↑3   ↑3   .
"""
    )


def test_times_that_are_given_are_drawn_and_shared_slots_joined():
    schedule = make_schedule("1f1b", pipe=2, chunks=1, num_microbatches=2)
    assert to_text(schedule, [[0, 1, 3, 4], [1, 1, 2, 2]]) == (
        "rank    0       1       2       3       4\n"
        "   0   0F0     0F1      .      0B0     0B1\n"
        "   1    .    1F0+1B0 1F1+1B1    .       .\n"
    )


def test_a_schedule_that_stalls_cannot_be_drawn():
    stalled = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "stalled")
    with pytest.raises(ScheduleError, match="deadlock"):
        to_text(stalled)


def test_csv_has_a_row_for_each_rank():
    schedule = make_schedule("zb_v", pipe=2, chunks=2, num_microbatches=1)
    assert to_csv(schedule) == "0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2I0,2W0,1I0,1W0\n"


@given(st.one_of(user_schedules(), generated_schedules()))
def test_csv_and_back(schedule):
    read = from_csv(to_csv(schedule), schedule.name)
    assert (read.actions, read.placement) == (schedule.actions, schedule.placement)


@given(user_schedules(), st.randoms(use_true_random=False))
def test_idle_cells_spaces_and_blank_lines_are_ignored(schedule, rng):
    lines = []
    for row in schedule.actions:
        cells = [f" {action}\t" for action in row]
        for _ in range(rng.randint(0, 5)):
            cells.insert(rng.randint(0, len(cells)), rng.choice(["", " "]))
        lines += [",".join(cells), *rng.choice([[], [""], ["  "]])]
    read = from_csv(rng.choice(["\n", "\r\n"]).join(lines), schedule.name)
    assert (read.actions, read.placement) == (schedule.actions, schedule.placement)


def test_a_table_of_torchs_form_is_the_schedule_by_name():
    text = (pathlib.Path(__file__).parent / "overlapped.csv").read_text()
    read = from_csv(text, "dual_pipe_v")
    assert read == make_schedule("dual_pipe_v", pipe=2, num_microbatches=4, order="ahead")
    assert read.notes == (
        "skipped, since they follow from the order: 32 sends and receives, 8 gathers and releases of weights, "
        "4 sums of gradients over replicas",
        "overlapped pairs read as a forward and then a backward: 6",
    )


@st.composite
def exported(draw):
    """A schedule, its table as torch might export it, and how many tokens of each sort the table has beside actions."""
    schedule = draw(st.one_of(user_schedules(), generated_schedules()))
    numbers = dict.fromkeys(("sends", "gathers", "sums", "pairs"), 0)
    lines = []
    for row in schedule.actions:
        cells, rest = [], list(row)
        while rest:
            for _ in range(draw(st.integers(0, 2))):
                sort = draw(st.sampled_from(["sends", "gathers", "sums"]))
                words = {"sends": ["SEND_F", "RECV_F", "SEND_B", "RECV_B"], "gathers": ["UNSHARD", "RESHARD"]}
                word = draw(st.sampled_from(words.get(sort, ["REDUCE_GRAD"])))
                microbatch = draw(st.integers(0, 20)) if sort == "sends" else ""
                cells.append(f"{draw(st.integers(0, 20))}{word}{microbatch}")
                numbers[sort] += 1
            kinds = "".join(action.kind for action in rest[:2])
            paired = kinds in ("FB", "FI") and draw(st.booleans())
            cells.append(f"({rest.pop(0)};{rest.pop(0)})OVERLAP_F_B" if paired else str(rest.pop(0)))
            numbers["pairs"] += paired
        lines.append(",".join(cells))
    return schedule, "\n".join(lines), numbers


@given(exported())
def test_a_table_with_communication_and_pairs_is_that_without(example):
    schedule, text, numbers = example
    read = from_csv(text, schedule.name)
    assert (read.actions, read.placement) == (schedule.actions, schedule.placement)
    notes = " ".join(read.notes)
    for sort, words in {"sends": "sends", "gathers": "gathers", "sums": "sums of gradients"}.items():
        assert (f"{numbers[sort]} {words}" in notes) == (numbers[sort] > 0)
    assert (f"then a backward: {numbers['pairs']}" in notes) == (numbers["pairs"] > 0)
    assert len(read.notes) == (sum(numbers.values()) > numbers["pairs"]) + (numbers["pairs"] > 0)


def test_a_stray_action_does_not_move_its_stage():
    schedule = from_csv("1F0,0F0,0B0\n1B0,1F1,1B1\n", "stray")
    assert schedule == Schedule(
        "stray",
        (
            (Action.parse("1F0"), Action.parse("0F0"), Action.parse("0B0")),
            tuple(map(Action.parse, ("1B0", "1F1", "1B1"))),
        ),
        placement=(0, 1),
    )


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("0F0,0B0\n1F0,,1X0\n", "t.csv, row 2, column 3: '1X0' is not an action: "),
        ("0F0;0B0\n", "t.csv, row 1, column 1: '0F0;0B0' is not an action: "),
        ("\n0F0, 0 B0\n", "t.csv, row 2, column 2: '0 B0' is not an action: "),
        ("0F0,0SEND_F\n", "t.csv, row 1, column 2: '0SEND_F' is not an action: "),
        ("0F0,0UNSHARD1\n", "t.csv, row 1, column 2: '0UNSHARD1' is not an action: "),
        ("0F0,0ALL_REDUCE\n", "t.csv, row 1, column 2: '0ALL_REDUCE' is not an action: "),
        ("(0F1;3X0)OVERLAP_F_B\n", "t.csv, row 1, column 1: '3X0' is not an action: "),
        ("(0F1;3B0;0F2)OVERLAP_F_B\n", "t.csv, row 1, column 1: '(0F1;3B0;0F2)OVERLAP_F_B' is not an action: "),
        (
            "0F0,(3B0;0F1)OVERLAP_F_B\n",
            "t.csv, row 1, column 2: '(3B0;0F1)OVERLAP_F_B' must pair a forward and a backward, in this order. A table",
        ),
        ("0F0,0B0\n3F0,3B0\n", "t.csv: no row has an action of stage 1, though there is a stage 3. "),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text, start):
    with pytest.raises(ScheduleError) as error:
        from_csv(text, "t.csv")
    assert str(error.value).startswith(start)
    assert "no row" in start or str(error.value).endswith(
        " A table may also have (0F7;3B1)OVERLAP_F_B, read as a forward and then a backward, and SEND_F, RECV_F, "
        "SEND_B, RECV_B, UNSHARD, RESHARD and REDUCE_GRAD as torch writes them, which are skipped."
    )
