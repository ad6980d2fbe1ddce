"""Schedules that a function in a Python file makes: which file is run when, and every mistake with its answer."""

import os
import pathlib
import sys
import threading

import pytest

from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.text import to_csv
from fiddlex.terminal import interrupts

HEAD = "from fiddlex.schedules.schedule import Action, Kind, Schedule, alternate\n"
EAGER = f"""{HEAD}

def eager(*, pipe, chunks=1, num_microbatches):
    rows = []
    for rank in range(pipe):
        forwards, backwards = ([Action(rank, kind, k) for k in range(num_microbatches)] for kind in (Kind.F, Kind.B))
        rows.append(alternate(forwards, backwards, warmup=2 * (pipe - rank - 1)))
    return Schedule("eager", rows, placement=list(range(pipe)))
"""
SIZES = {"pipe": 2, "num_microbatches": 3}


@pytest.fixture
def file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(EAGER)
    return tmp_path / "mine.py"


def test_a_function_makes_a_schedule_of_any_sizes_that_keeps_its_order(file):
    for name in ("mine.py:eager", f"{file}:eager"):
        schedule = make_schedule(name, **SIZES)
        assert [" ".join(map(str, row)) for row in schedule.actions] == [
            "0F0 0F1 0F2 0B0 0B1 0B2",
            "1F0 1B0 1F1 1B1 1F2 1B2",
        ]
        assert (schedule.name, schedule.placement, schedule.strict) == (name, (0, 1), True)
    assert not make_schedule("mine.py:eager", **SIZES, order="ahead").strict
    assert make_schedule("mine.py:eager", pipe=5, chunks=1, num_microbatches=9).num_microbatches == 9


def test_a_file_is_run_once_for_each_of_its_states(file):
    file.write_text(EAGER + "\nwith open('runs', 'a') as runs:\n    print('run', file=runs)\n")
    for number in (2, 3):
        make_schedule("mine.py:eager", pipe=2, num_microbatches=number)
    assert pathlib.Path("runs").read_text() == "run\n"
    file.write_text(EAGER.replace("2 * (pipe", "0 * (pipe"))
    os.utime(file, ns=(0, 0))
    assert " ".join(map(str, make_schedule("mine.py:eager", **SIZES).actions[0])) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_a_file_uses_modules_of_its_folder(file, monkeypatch):
    """When it is run, and when its function is; afterwards Python looks for modules where it did before."""
    file.rename(file.parent / "schedules_beside_it.py")
    file.write_text(
        "from schedules_beside_it import eager\n"
        "def mine(**sizes):\n    import schedules_beside_it\n    return schedules_beside_it.eager(**sizes)\n"
    )
    monkeypatch.chdir("/")
    before = list(sys.path)
    for function in ("eager", "mine"):
        monkeypatch.delitem(sys.modules, "schedules_beside_it", raising=False)
        assert make_schedule(f"{file}:{function}", **SIZES).num_microbatches == 3
    assert sys.path == before


def test_a_path_may_begin_with_the_home_of_the_user(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    schedule = make_schedule("~/mine.py:eager", **SIZES)
    (file.parent / "mine.csv").write_text(to_csv(schedule))
    assert make_schedule("file:~/mine.csv").actions == schedule.actions


@pytest.mark.parametrize("make", [pathlib.Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_run(make, tmp_path):
    make(tmp_path / "mine.py")
    with pytest.raises(ScheduleError, match=r"mine\.py is not a file\.$"):
        make_schedule(f"{tmp_path}/mine.py:mine", **SIZES)


def body(text: str) -> str:
    """A file with a function `mine` of this body, which begins in line 3."""
    return f"{HEAD}def mine(*, pipe, chunks=1, num_microbatches):\n    {text}\n"


FORWARD = "Action(0, Kind.F, 0)"
TAKES = "It must take the keyword arguments of def mine(*, pipe, chunks=1, num_microbatches)."
ACTION = "it must be an action, as in Action(stage=0, kind=Kind.F, microbatch=0)."


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (
            None,
            "nothing.py:mine",
            "schedule nothing.py:mine: {folder}/nothing.py cannot be read (No such file or directory). Give the path "
            "of a Python file and the name of a function in it, as in my/file.py:mine.",
        ),
        (
            EAGER,
            "mne.py:eager",
            "schedule mne.py:eager: {folder}/mne.py cannot be read (No such file or directory). Did you mean mine.py? "
            "Give the path of a Python file and the name of a function in it, as in my/file.py:mine.",
        ),
        (EAGER, "mine.py:eagre", "schedule mine.py:eagre: mine.py has no function 'eagre'. Did you mean 'eager'?"),
        (EAGER, "mine.py:zb", "schedule mine.py:zb: mine.py has no function 'zb'. Known: eager."),
        (
            HEAD,
            "mine.py:mine",
            "schedule mine.py:mine: mine.py has no function 'mine'. Write one that begins with def mine(*, pipe, "
            "chunks=1, num_microbatches).",
        ),
        (EAGER, "mine.py", "schedule mine.py: name a function of the file too, as in mine.py:eager."),
        (EAGER, "mine.py:", "schedule mine.py: name a function of the file too, as in mine.py:eager."),
        (
            EAGER,
            "mine:eager",
            "there is no schedule 'mine:eager'. A function of your own is named by its file, as in mine.py:eager.",
        ),
        (
            EAGER,
            "file:mine.py:eager",
            "schedule file:mine.py:eager: file: is for a table. A function in a Python file is named without it: "
            "mine.py:eager.",
        ),
        (
            EAGER,
            "file:mine.py",
            "schedule file:mine.py: file: is for a table. A function in a Python file is named without it: "
            "mine.py:FUNCTION.",
        ),
        (EAGER, "table.csv", "there is no schedule 'table.csv'. A table in a file is named file:table.csv."),
        ("def mine(:\n", "mine.py:mine", "schedule mine.py:mine: mine.py, line 1: invalid syntax."),
        (
            "import nothing_of_this_name\n",
            "mine.py:mine",
            "schedule mine.py:mine: mine.py, line 1: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        (
            "raise SystemExit(3)\n",
            "mine.py:mine",
            "schedule mine.py:mine: mine.py, line 1: SystemExit(3) would end the program. A file that a program runs "
            "must not exit: raise an error that says what is wrong.",
        ),
        (
            body("return {}[pipe]"),
            "mine.py:mine",
            "schedule mine.py:mine: mine.py, line 3: KeyError: 2",
        ),
        (
            body("return alternate([], [], warmup=[])"),
            "mine.py:mine",
            "schedule mine.py:mine: mine.py, line 3: TypeError: slice indices must be integers or None or have an "
            "__index__ method",
        ),
        (
            "from fiddlex.errors import ScheduleError\n" + body("raise ScheduleError('Use an odd number of ranks.')"),
            "mine.py:mine",
            "schedule mine.py:mine: Use an odd number of ranks.",
        ),
        (
            body("return None"),
            "mine.py:mine",
            "schedule mine.py:mine: mine of mine.py returned None; it must return a fiddlex.schedules.schedule."
            "Schedule.",
        ),
        (
            "def mine(pipe, m):\n    pass\n",
            "mine.py:mine",
            "schedule mine.py:mine: mine.py has mine(pipe, m), which cannot be called with pipe, num_microbatches "
            f"(missing a required argument: 'm'). {TAKES}",
        ),
        (
            body("return Schedule('x', 3, (0,))"),
            "mine.py:mine",
            "schedule mine.py:mine: its actions must be a tuple with a tuple of actions for each rank.",
        ),
        (
            body("return Schedule('x', ([(0, 'F', 0)],), (0,))"),
            "mine.py:mine",
            f"schedule mine.py:mine: position 0 of rank 0 is (0, 'F', 0); {ACTION}",
        ),
        (
            body("return Schedule('x', ([Action(0, 'F', 0)],), (0,))"),
            "mine.py:mine",
            f"schedule mine.py:mine: position 0 of rank 0 is of kind 'F'; {ACTION}",
        ),
        (
            body(f"return Schedule('x', (({FORWARD},),), 0)"),
            "mine.py:mine",
            "schedule mine.py:mine: its placement is 0; it must be a tuple with the rank of each stage.",
        ),
        (
            body(f"return Schedule('x', (({FORWARD}, Action(0, Kind.B, 0)),), (0,))"),
            "mine.py:mine",
            "schedule mine.py:mine has other sizes: the function made pipe=1 (not 2), "
            "num_microbatches=1 (not 3). Let it make the sizes that it is given, or set pipe=1, num_microbatches=1.",
        ),
        (
            body(f"return Schedule('x', (({FORWARD},), (Action(1, Kind.F, 0),)), (0, 1))"),
            "mine.py:mine",
            "schedule mine.py:mine: 0B0 is missing: each forward has a backward: B, or I and W (there are 1 "
            "microbatches). Add it to rank 0, which holds stage 0.\nrank 0  0F0  >0B0?<\nrank 1  1F0",
        ),
    ],
)
def test_mistakes(text, name, message, file):
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ScheduleError) as error:
        make_schedule(name, **SIZES)
    assert str(error.value) == message.replace("{folder}", str(file.parent))


def test_a_signal_while_a_file_runs_is_no_mistake_of_the_file(file, monkeypatch):
    monkeypatch.setattr(interrupts, "_is_interrupted", threading.Event())
    imports = "from fiddlex.errors import Stopped\nfrom fiddlex.terminal import interrupts\n"
    file.write_text(imports + body("interrupts.interrupt(Stopped, 15)"))
    with pytest.raises(SystemExit) as ended:
        make_schedule("mine.py:mine", **SIZES)
    assert ended.value.code == 143
    file.write_text(body("raise SystemExit(143)"))
    with pytest.raises(ScheduleError, match="would end the program"):  # though a signal came before
        make_schedule("mine.py:mine", **SIZES)


def test_other_errors_of_fiddlex_pass(file):
    file.write_text("from fiddlex.errors import ConfigError\n" + body("raise ConfigError('own')"))
    with pytest.raises(ConfigError, match=r"^own$"):
        make_schedule("mine.py:mine", **SIZES)


def test_a_callable_without_a_signature_is_no_traceback(file):
    file.write_text("mine = type\n")
    with pytest.raises(ScheduleError, match=r"^schedule mine\.py:mine: mine\.py: ValueError: no signature found"):
        make_schedule("mine.py:mine", **SIZES)


@pytest.mark.parametrize("missing", ["pipe", "num_microbatches"])
def test_a_function_needs_sizes(missing, file):
    with pytest.raises(ScheduleError, match=r"^schedule mine\.py:eager needs pipe and num_microbatches; only a table"):
        make_schedule("mine.py:eager", **{size: number for size, number in SIZES.items() if size != missing})
