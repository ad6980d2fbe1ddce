import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules import generators
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.text import to_csv
from tests.schedules.strategies import IN_A_V, is_legal, sizes

NAMES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "breadth_first",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dual_pipe_v",
)


def test_these_schedules_exist():
    assert tuple(GENERATORS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_schedules_are_legal_and_have_the_sizes_asked_for(name, data):
    asked = data.draw(sizes(name))
    schedule = make_schedule(name, **asked)
    assert is_legal(schedule.actions, schedule.placement, asked["num_microbatches"])
    assert schedule.name == name
    assert schedule.num_ranks == asked["pipe"]
    assert schedule.num_chunks == asked["chunks"]
    assert schedule.num_stages == asked["pipe"] * asked["chunks"]
    assert schedule.num_microbatches == asked["num_microbatches"]
    assert schedule.split_backward == (name.startswith("zb_") or name in IN_A_V)


def warmups(schedule):
    """Forwards ahead of the first pair of a forward and a backward, for each rank."""
    return [[action.kind for action in row].index(Kind.B) - 1 for row in schedule.actions]


def test_warm_up_of_1f1b():
    assert warmups(make_schedule("1f1b", pipe=4, chunks=1, num_microbatches=6)) == [3, 2, 1, 0]
    assert warmups(make_schedule("1f1b", pipe=4, chunks=1, num_microbatches=2)) == [1, 1, 1, 0]  # all are warm-up


def test_warm_up_and_order_of_interleaved_1f1b():
    schedule = make_schedule("interleaved_1f1b", pipe=4, chunks=2, num_microbatches=8)
    assert schedule.placement == (0, 1, 2, 3, 0, 1, 2, 3)
    assert warmups(schedule) == [10, 8, 6, 4]  # 2(p−r−1) + (v−1)p
    forwards = [str(action) for action in schedule.actions[1] if action.kind is Kind.F]
    backwards = [str(action) for action in schedule.actions[1] if action.kind is Kind.B]
    assert " ".join(forwards) == "1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 1F5 1F6 1F7 5F4 5F5 5F6 5F7"
    assert " ".join(backwards) == "5B0 5B1 5B2 5B3 1B0 1B1 1B2 1B3 5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7"


def test_order_of_breadth_first():
    schedule = make_schedule("breadth_first", pipe=2, chunks=3, num_microbatches=2)
    assert schedule.placement == (0, 1, 0, 1, 0, 1)
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1F1 3F0 3F1 5F0 5F1 5B0 5B1 3B0 3B1 1B0 1B1"


@pytest.mark.parametrize("name", IN_A_V)
def test_stages_are_placed_in_a_v(name):
    assert make_schedule(name, pipe=3, chunks=2, num_microbatches=4).placement == (0, 1, 2, 2, 1, 0)


def test_order_of_dual_pipe_v():
    """Derived by hand from the phases that torch's source tells, for p = 3 and m = 6."""
    schedule = make_schedule("dual_pipe_v", pipe=3, num_microbatches=6)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 0F5 5B2 5F3 0B0 5B3 5F4 0B1 5B4 5F5 0B2 5B5 "
        "0I3 0W3 0I4 0W4 0I5 0W5",
        "1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 1F4 4B1 4F3 1B0 1F5 4B2 4F4 1B1 4B3 4F5 1B2 4B4 1B3 "
        "4I5 1I4 4W5 1I5 1W4 1W5",
        "2F0 3F0 2F1 3F1 2F2 3F2 2F3 3B0 3F3 2B0 2F4 3B1 3F4 2B1 2F5 3B2 3F5 2B2 3B3 2B3 3B4 2I4 3I5 2I5 2W4 3W5 2W5",
    ]


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("1f1b", (0, 1, 4), "schedule 1f1b: pipe=0 must be at least 1."),
        ("1f1b", (2, 0, 4), "schedule 1f1b: chunks=0 must be at least 1."),
        ("1f1b", (2, 1, 0), "schedule 1f1b: num_microbatches=0 must be at least 1."),
        ("gpipe", (2, 2, 4), "schedule gpipe has other sizes: set chunks=1 (not 2)."),
        ("zb_h1", (2, 2, 4), "schedule zb_h1 has other sizes: set chunks=1 (not 2)."),
        ("zb_v", (2, 1, 4), "schedule zb_v has other sizes: set chunks=2 (not 1)."),
        ("zb_h3", (2, 1, 4), "there is no schedule 'zb_h3'. Did you mean 'zb_h2'?"),
        ("Auto", (2, 1, 4), "there is no schedule 'Auto'. Did you mean 'auto'?"),
        (
            "auto",
            (2, 1, 4),
            "schedule auto has to be searched first, for its costs: fiddlex.planner.settle.settle puts the table that "
            "it finds into a config.",
        ),
        ("1F1B", (2, 1, 4), "there is no schedule '1F1B': it is called 1f1b here."),
        ("file", (2, 1, 4), "there is no schedule 'file'. Did you mean 'file:PATH.csv'?"),
        (
            "interleaved_1f1b",
            (4, 2, 6),
            "interleaved_1f1b with pipe=4, num_microbatches=6: the microbatches must be a multiple of the ranks, since "
            "they pass the chunks in groups of one for each rank. Use 4 or 8 microbatches; 1f1b and zb_v take any "
            "number.",
        ),
    ],
)
def test_what_does_not_exist_is_refused_with_rule_and_remedy(name, asked, message):
    with pytest.raises(ScheduleError) as error:
        make_schedule(name, **dict(zip(("pipe", "chunks", "num_microbatches"), asked, strict=True)))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("asked", "here"),
    [
        ("GPipe", "gpipe"),
        ("FThenB", "gpipe"),
        ("Schedule1F1B", "1f1b"),
        ("PipeDream-Flush", "1f1b"),
        ("DAPPLE", "1f1b"),
        ("depth_first", "interleaved_1f1b"),
        ("looped_dfs", "interleaved_1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("interleaved", "interleaved_1f1b"),
        ("vpp", "interleaved_1f1b"),
        ("virtual pipeline", "interleaved_1f1b"),
        ("breadth-first", "breadth_first"),
        ("looped_bfs", "breadth_first"),
        ("bfs", "breadth_first"),
        ("LoopedBFS", "breadth_first"),
        ("loopedgpipe", "breadth_first"),
        ("interleaved_gpipe", "breadth_first"),
        ("zbh1", "zb_h1"),
        ("zbv", "zb_v"),
        ("ZBVZeroBubble", "zb_v"),
        ("V-Half", "v_half"),
        ("vhalf", "v_half"),
        ("VMin", "v_min"),
        ("dualpipev", "dual_pipe_v"),
        ("ScheduleDualPipeV", "dual_pipe_v"),
    ],
)
def test_who_knows_a_schedule_by_another_name_is_told_its_name_here(asked, here):
    with pytest.raises(ScheduleError) as error:
        make_schedule(asked, pipe=2, num_microbatches=4)
    assert str(error.value) == f"there is no schedule {asked!r}: it is called {here} here."


def test_torchs_interleaved_zero_bubble_is_told_as_what_it_is_with_one_stage_and_with_more():
    with pytest.raises(ScheduleError) as error:
        make_schedule("ScheduleInterleavedZeroBubble", pipe=2, num_microbatches=4)
    assert str(error.value) == (
        "there is no schedule 'ScheduleInterleavedZeroBubble': with one stage on each rank it is called zb_h1 here, "
        "and with more it runs from a table, file:PATH.csv."
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_no_more_actions_are_made_than_can_be_lowered(name):
    with pytest.raises(ScheduleError, match=r"has 17,179,869,176 actions or more; it can have 16,777,216\. Use fewer"):
        make_schedule(name, pipe=4, num_microbatches=2**31 - 1)


def test_interleaved_with_fewer_microbatches_than_ranks_names_the_only_near_multiple():
    with pytest.raises(ScheduleError, match="Use 4 microbatches;"):
        make_schedule("interleaved_1f1b", pipe=4, chunks=2, num_microbatches=3)


def test_a_table_in_a_file_is_a_schedule(tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text(
        "0F0,,0F1,3F0,3B0,0B0,3F1,3B1,0B1\n,1F0,2F0,1F1,2F1,2I0,1B0,2W0,2I1,2W1,1B1\n", encoding="utf-8-sig"
    )
    schedule = make_schedule(f"file:{table}", pipe=2, chunks=2, num_microbatches=2)
    assert schedule.name == f"file:{table}"
    assert schedule.placement == (0, 1, 1, 0)
    assert to_csv(schedule).splitlines()[0] == "0F0,0F1,3F0,3B0,0B0,3F1,3B1,0B1"


def test_a_file_has_sizes_of_its_own(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(to_csv(make_schedule("zb_v", pipe=3, chunks=2, num_microbatches=5)), encoding="utf-8")
    schedule = make_schedule(f"file:{table}")
    assert (schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches) == (3, 2, 5)


@pytest.mark.parametrize("asked", [{"pipe": 2}, {"num_microbatches": 2}])
def test_by_name_only_the_chunks_may_be_left_out(asked):
    with pytest.raises(ScheduleError, match="schedule 1f1b needs pipe and num_microbatches; only a table has its own"):
        make_schedule("1f1b", **asked)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_left_out_are_as_many_as_the_generator_takes(name):
    schedule = make_schedule(name, pipe=2, num_microbatches=4)
    assert schedule.num_chunks == (2 if name in IN_A_V else 1)


SIZES = {"pipe": 3, "chunks": 1, "num_microbatches": 5}


@pytest.mark.parametrize("wrong", [["pipe"], ["chunks", "num_microbatches"], ["pipe", "chunks", "num_microbatches"]])
def test_all_sizes_in_which_a_file_differs_are_told_at_once(tmp_path, wrong):
    table = tmp_path / "table.csv"
    table.write_text(to_csv(make_schedule("1f1b", **SIZES)), encoding="utf-8")
    words = {"pipe": "--pipe", "chunks": "--chunks", "num_microbatches": "--microbatches"}
    remedies = ", ".join(f"{words[size]}={SIZES[size]} (not 7)" for size in wrong)
    with pytest.raises(ScheduleError) as error:
        make_schedule(f"file:{table}", **(SIZES | dict.fromkeys(wrong, 7)), words=tuple(words.values()))
    other = "or name a schedule that exists for any, such as 1f1b."
    assert str(error.value) == f"schedule file:{table} has other sizes: set {remedies}, {other}"


def test_a_file_that_breaks_a_rule_is_refused_with_the_grid(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("0F0,0B0\n1B0,1F0\n", encoding="utf-8")
    with pytest.raises(ScheduleError, match="rank 1 >1B0< 1F0"):
        make_schedule(f"file:{table}", pipe=2, chunks=1, num_microbatches=1)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    table = tmp_path / "table.csv"
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(ScheduleError, match=r"table\.csv cannot be read"):
        make_schedule(f"file:{table}", pipe=2, chunks=1, num_microbatches=1)


def test_the_example_in_the_docstring_works(monkeypatch):
    monkeypatch.setitem(GENERATORS, "mine", GENERATORS["1f1b"])  # so that it is gone at the end
    lines = generators.__doc__.splitlines()
    example = "\n".join(line for line in lines if line.startswith("    ") or not line)
    exec(textwrap.dedent(example), vars(generators).copy())
    schedule = make_schedule("mine", pipe=3, chunks=1, num_microbatches=4)
    assert " ".join(map(str, schedule.actions[2])) == "2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3"


def test_a_generator_of_ones_own_is_proven_legal(monkeypatch):
    def forgetful(*, pipe, chunks, num_microbatches):
        return Schedule("forgetful", tuple((Action(rank, Kind.F, 0),) for rank in range(pipe)), tuple(range(pipe)))

    monkeypatch.setitem(GENERATORS, "forgetful", forgetful)
    with pytest.raises(ScheduleError, match=r"rank 0  0F0  >0B0\?<"):
        make_schedule("forgetful", pipe=2, chunks=1, num_microbatches=1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda **sizes: 1 // 0, r"schedule mine: .*test_generators\.py, line \d+: ZeroDivisionError"),
        (lambda **sizes: [1, 2], r"schedule mine: .*returned \[1, 2\]; it must return a fiddlex"),
        (lambda: None, r"which cannot be called with pipe, num_microbatches"),
    ],
)
def test_errors_of_a_registered_function_are_told(made, message, monkeypatch):
    monkeypatch.setitem(GENERATORS, "mine", made)
    with pytest.raises(ScheduleError, match=message):
        make_schedule("mine", pipe=2, num_microbatches=4)


def test_a_registered_function_keeps_its_order(monkeypatch):
    monkeypatch.setitem(GENERATORS, "mine", GENERATORS["1f1b"])
    sizes = {"pipe": 2, "num_microbatches": 4}
    assert make_schedule("mine", **sizes).strict == make_schedule("1f1b", **sizes).strict


def test_a_schedule_of_fiddlex_is_not_replaced(monkeypatch):
    monkeypatch.setitem(GENERATORS, "1f1b", GENERATORS["gpipe"])
    with pytest.raises(
        ScheduleError, match=r"GENERATORS\['1f1b'\] is another than fiddlex's own.*register yours under"
    ):
        make_schedule("1f1b", pipe=2, chunks=1, num_microbatches=2)
