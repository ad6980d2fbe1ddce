"""Every command with a schedule of one's own: a function in a Python file, a table, and a name beside them."""

import json
import pathlib

import pytest

from tests import programs

FUNCTION = '''\
from fiddlex.schedules.schedule import Action, Kind, Schedule, alternate


def eager(*, pipe, chunks=1, num_microbatches):
    """1F1B with twice the warm-up."""
    rows = []
    for rank in range(pipe):
        forwards, backwards = ([Action(rank, kind, k) for k in range(num_microbatches)] for kind in (Kind.F, Kind.B))
        rows.append(tuple(alternate(forwards, backwards, warmup=2 * (pipe - rank - 1))))
    return Schedule("eager", tuple(rows), placement=tuple(range(pipe)))


def even(*, pipe, chunks=1, num_microbatches):
    from fiddlex.errors import ScheduleError

    if num_microbatches % 2:
        raise ScheduleError("Use an even number of microbatches.")
    return eager(pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
'''
TABLE = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
SMALL = (
    "--config=gpt_tiny",
    "--config.mesh.data=1",
    "--config.mesh.tensor=1",
    "--config.mesh.pipe=2",
    "--config.mesh.sequence_parallel=False",
    "--config.model.num_layers=2",
    "--config.pipeline.num_chunks=1",
    "--config.pipeline.num_microbatches=4",
)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "mine.csv").write_text(TABLE)
    (tmp_path / "failing.py").write_text("def mine(*, pipe, chunks=1, num_microbatches):\n    return pipe / 0\n")
    return tmp_path


BUBBLE = (
    "bubble: the time of a batch beyond the work of the busiest rank, divided by that work; free-running, it is the "
    "longest from a rank's first action to its last; in lockstep, it is the makespan"
)
PAGE = f"""\
mine.py:eager: pipe=2, chunks=1, microbatches=3

free-running, each action in one slot:
rank  0   1   2   3   4   5   6   7
   0 0F0 0F1 0F2 0B0  .  0B1  .  0B2
   1  .  1F0 1B0 1F1 1B1 1F2 1B2  .

lockstep, 8 ticks:
rank  0   1   2   3   4   5   6   7
   0 0F0 0F1 0F2 0B0  .  0B1  .  0B2
   1  .  1F0 1B0 1F1 1B1 1F2 1B2  .
  each rank runs one action a tick, in the schedule's order; with --order=ahead, F and B share ticks

costs, in any unit: forward=1,backward_input=1,backward_weight=1,hop=0,embed=0,head=0,embed_backward=0
{BUBBLE}

free-running: makespan 12, bubble 0.3333 of the work: a batch takes 12, the busiest rank works 9
  most activations held by each rank, in microbatches of the whole rank: 3 1

lockstep: makespan 14, bubble 0.5556 of the work: a batch takes 14, the busiest rank works 9
  most activations held by each rank, in microbatches of the whole rank: 3 1
"""


def test_schedule_prints_a_function(folder):
    done = programs.call("schedule", "--name=mine.py:eager", "--pipe=2", "--microbatches=3", cwd=folder)
    assert done.stdout == PAGE
    docs = (programs.ROOT / "docs" / "pipeline.md").read_text()
    assert FUNCTION.partition("\n\n\ndef even")[0] in docs
    assert BUBBLE.partition(";")[0].removeprefix("bubble: ") in docs.replace("\n", " ")


AHEAD = """\
  the ticks run 3 forwards before backwards that come first in the schedule: on rank 0 at first 0F3, before 0B0, so \
that the rank holds 4 forward passes of a stage instead of 3; --order=strict keeps the schedule's order
"""


def test_schedule_tells_what_the_ticks_move():
    sizes = ("--name=1f1b", "--pipe=3", "--microbatches=4")
    assert AHEAD in programs.call("schedule", *sizes).stdout
    assert AHEAD in (programs.ROOT / "docs" / "pipeline.md").read_text()
    facts = json.loads(programs.call("schedule", *sizes, "--format=json").stdout)
    assert facts["order"] == "ahead"
    assert facts["moved"] == [
        {"rank": 0, "forwards": ["0F3"], "passed": "0B0", "held": 4, "held_in_order": 3},
        {"rank": 1, "forwards": ["1F2", "1F3"], "passed": "1B0", "held": 3, "held_in_order": 2},
    ]
    assert facts["lockstep"]["peak_inflight"][:2] == [4, 3]
    kept = json.loads(programs.call("schedule", *sizes, "--order=strict", "--format=json").stdout)
    assert (kept["order"], kept["moved"]) == ("strict", [])


def test_both_bubbles_of_zb_v_follow_from_one_definition():
    done = programs.call("schedule", "--name=zb_v", "--pipe=4", "--microbatches=8")
    assert BUBBLE in done.stdout.splitlines()
    bubbles = [line for line in done.stdout.splitlines() if ": makespan" in line]
    assert bubbles == [
        "free-running: makespan 51, bubble 0 of the work: a batch takes 48, the busiest rank works 48",
        "lockstep: makespan 51, bubble 0.0625 of the work: a batch takes 51, the busiest rank works 48",
    ]
    assert "\n…\n".join(bubbles) in (programs.ROOT / "docs" / "pipeline.md").read_text()


def test_comparison_of_a_name_a_function_and_a_table(folder):
    names = "1f1b,mine.py:eager@1,file:mine.csv"
    done = programs.call("schedule", f"--compare={names}", "--pipe=2", "--microbatches=2", cwd=folder)
    rows = [line.split() for line in done.stdout.splitlines()[2:5]]
    assert [" ".join(row) for row in rows] == [
        "1f1b 2 1 2 4 | 9 0.5 2 0 | 9 0.5 2 0",
        "mine.py:eager@1 2 1 2 6 | 9 0.5 2 0 | 10 0.6667 2 0",
        "file:mine.csv 2 1 2 8 | 12 1 1 0 | 12 1 1 0",
    ]


BUBBLES = f"""\
| schedule | p | v | m | formula | free-running | lockstep | ticks | held, free | held, lockstep |
|---|---|---|---|---|---|---|---|---|---|
| 1f1b | 2 | 1 | 2 | 0.5000 | 0.5000 | 0.5000 | 4 | 2 | 2 |
| mine.py:even | 2 | 1 | 2 |  | 0.5000 | 0.6667 | 6 | 2 | 2 |
| file:mine.csv | 2 | 1 | 2 |  | 1.0000 | 1.0000 | 8 | 1 | 1 |
| 1f1b | 2 | 1 | 3 | 0.3333 | 0.3333 | 0.3333 | 5 | 2 | 3 |

{BUBBLE}
"""
OWN = ("--schedule=1f1b", "--schedule=mine.py:even", "--schedule=file:mine.csv")


def test_bubbles_of_a_name_a_function_and_a_table(folder):
    done = programs.call("bubbles", *OWN, "--pipe=2", "--microbatches=2", "--microbatches=3", cwd=folder)
    assert done.stdout == BUBBLES
    assert done.stderr == (
        "--schedule=mine.py:even: left out at 1 size, the last since: schedule mine.py:even: Use an even number of "
        "microbatches.\n"
        "--schedule=file:mine.csv: left out at 1 size, the last since: schedule file:mine.csv has other sizes: set "
        "--microbatches=2 (not 3), or name a schedule that exists for any, such as 1f1b.\n"
    )
    rows = programs.call("bubbles", "--schedule=mine.py:eager", "--semantics=2bw", "--pipe=4", cwd=folder).stdout
    assert rows.splitlines()[2] == "| mine.py:eager | 4 | 1 | 4 | 2.000 | 2.000 | 1.00 | 14 | 14 |"


def test_what_if_the_schedule_were_ones_own(folder):
    changes = ("--topology=a100_80", "--change=schedule=mine.py:eager", "--change=order=strict")
    done = programs.call("what_if", *SMALL, "--config.pipeline.schedule=1f1b", *changes[:2], cwd=folder)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["as", "schedule=mine.py:eager"]
    own = programs.call("what_if", *SMALL, "--config.pipeline.schedule=mine.py:eager", *changes[:1], cwd=folder)
    assert own.stdout.splitlines()[1].split()[3] == done.stdout.splitlines()[2].split()[1]


PLANNED = ("--config=gpt_tiny", "--topology=a100_80", "--num_devices=4", "--semantics=sync", "--format=json")


def test_plans_with_a_function_have_it_and_predict_what_it_takes(folder):
    written = folder / "planned.py"
    flags = ("--schedule=mine.py:even", "--schedule=1f1b", "--keep=40", f"--write={written}")
    plans = json.loads(programs.call("plan", *PLANNED, *flags, cwd=folder).stdout.splitlines()[-1])["plans"]
    assert {plan["pipeline"]["schedule"] for plan in plans} == {"mine.py:even", "1f1b"}
    assert min(plan["mesh"]["pipe"] for plan in plans) == 2
    own = next(plan for plan in plans if plan["pipeline"]["schedule"] == "mine.py:even")
    assert own["pipeline"]["num_microbatches"] % 2 == 0
    only = json.loads(programs.call("plan", *PLANNED, flags[0], f"--write={folder}/own.py", cwd=folder).stdout)["plans"]
    assert only[0] == own
    again = programs.call("what_if", f"--config={folder}/own.py", "--topology=a100_80", "--format=json", cwd=folder)
    assert json.loads(again.stdout)["step_time_s"] == pytest.approx(own["step_time_s"])


def test_plans_with_a_table_have_its_sizes(folder):
    (plan, *_) = json.loads(programs.call("plan", *PLANNED, "--schedule=file:mine.csv", cwd=folder).stdout)["plans"]
    assert (plan["mesh"]["pipe"], plan["pipeline"]["num_microbatches"]) == (2, 2)


def test_compile_tells_what_is_done_with_the_order(folder):
    compiled = ("--config.pipeline.schedule=mine.py:eager", "--config.data.global_batch_size=4")
    text = programs.call("compile", *SMALL, *compiled, cwd=folder).stdout
    assert text.splitlines()[1:3] == [
        "schedule mine.py:eager: 2 stages, 4 microbatches of 1, 10 ticks, a stash for 3 forward passes of a stage",
        "pipeline.order=auto: each rank runs one action a tick, in the schedule's order; with pipeline.order=ahead, F "
        "and B share ticks",
    ]


def test_train_tells_what_is_done_with_the_order_and_evaluate_needs_no_file(folder):
    own = ("--config.pipeline.schedule=mine.py:eager", "--config.pipeline.order=ahead", "--config.train.num_steps=1")
    own += ("--config.data.global_batch_size=4", "--config.data.eval_batches=1", "--config.train.sample_tokens=0")
    log = programs.call("train", *SMALL, *own, "--workdir=run", cwd=folder).stderr
    assert (
        "mine.py:eager: 2 ranks, 2 stages of 1 layer, 4 microbatches in 6 ticks, bubble 25% (the time of a batch "
        "beyond the work of the busiest rank, divided by that work), at most 3 forward passes of a stage stashed on a "
        "rank\n"
    ) in log
    (folder / "mine.py").unlink()
    done = programs.call("evaluate", "--workdir=run", cwd=folder)
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 1
    text = programs.call("generate", "--workdir=run", "--prompt=def ", "--num_tokens=2", cwd=folder).stdout
    assert text.startswith("def ")
    assert "mine.py is not there." in programs.call("train", *SMALL, *own, "--workdir=run", cwd=folder).stderr


REGISTERING = """\
from fiddlex.config.families import FAMILIES
from fiddlex.config.files import load_config
from fiddlex.schedules.generators import GENERATORS

import mine


def get_config():
    FAMILIES["own"] = FAMILIES["gpt"]
    GENERATORS["own_order"] = mine.eager
    config = load_config("gpt_tiny")
    config.model.family, config.pipeline.schedule = "own", "own_order"
    return config
"""


SHORT = (
    "--config.train.num_steps=1",
    "--config.data.global_batch_size=4",
    "--config.data.eval_batches=1",
    "--config.train.sample_tokens=0",
)


def test_what_a_config_file_registers_is_found_again(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "own.py").write_text(REGISTERING)
    log = programs.call("train", "--config=own.py", *SMALL[1:], *SHORT, "--workdir=run", cwd=folder).stderr
    assert "evaluate.py --workdir=run\n" in log
    one = ("--config.mesh.pipe=1", "--config.pipeline.num_microbatches=2")  # which the table of the workdir is not for
    done = programs.call("evaluate", "--workdir=run", *one, cwd=folder)
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 1
    flags = ("--workdir=run", "--prompt=def ", "--num_tokens=2")
    assert programs.call("generate", *flags, cwd=folder).stdout.startswith("def ")
    done = programs.call("convert", "--source=run", "--target=hf:given", cwd=folder, status=1)
    assert "--source=run: model.family=own with model.objective=lm, qk_norm=False" in done.stderr
    assert "no architecture of transformers is known that computes it." in done.stderr
    sizes = ("--pipe=2", "--microbatches=4")
    drawn = programs.call("schedule", "--config=own.py", "--name=own_order", *sizes, cwd=folder).stdout
    assert drawn.startswith("eager: pipe=2, chunks=1, microbatches=4\n")
    drawn = programs.call("schedule", "--workdir=run", cwd=folder).stdout
    assert drawn.startswith("eager: pipe=2, chunks=1, microbatches=4\n")
    again = ("--workdir=run", "--compare=own_order,1f1b", "--microbatches=6", "--format=json")
    compared = json.loads(programs.call("schedule", *again, cwd=folder).stdout)["schedules"]
    assert [(row["name"], row["microbatches"]) for row in compared] == [("own_order", 6), ("1f1b", 6)]
    rows = programs.call("bubbles", "--config=own.py", "--schedule=own_order", *sizes, cwd=folder).stdout
    assert rows.splitlines()[2].startswith("| own_order | 2 | 1 | 4 |")
    # A file that registers a schedule alone is taken by what reads a workdir too, such as one of another mesh.
    (folder / "order.py").write_text(REGISTERING.replace('FAMILIES["own"] =', "assert").replace('"own", ', '"gpt", '))
    done = programs.call("evaluate", "--workdir=no_run", "--config=order.py", cwd=folder, status=1)
    assert "no_run/config.json does not exist: --workdir=no_run is not the directory of a training run" in done.stderr


@pytest.mark.long
def test_a_run_goes_on_and_another_starts_from_it_under_configs_that_register_nothing(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "own.py").write_text(REGISTERING)
    programs.call("train", "--config=own.py", *SMALL[1:], *SHORT, "--workdir=run", cwd=folder)
    names = ("--config.model.family=own", "--config.pipeline.schedule=own_order", "--config.train.num_steps=2")
    log = programs.call("train", *SMALL, *SHORT[1:], *names, "--workdir=run", cwd=folder).stderr
    assert "Resuming from step 1" in log
    starts = ("--config.model.family=own", "--config.train.init_from=run", "--workdir=tuned")
    assert "starts from these weights" in programs.call("train", *SMALL, *SHORT, *starts, cwd=folder).stderr


@pytest.mark.parametrize(
    ("program", "flags", "message"),
    [
        (
            "schedule",
            ("--name=mine.py:eagr", "--pipe=2", "--microbatches=2"),
            "schedule mine.py:eagr: mine.py has no function 'eagr'. Did you mean 'eager'?",
        ),
        (
            "schedule",
            ("--name=mine.py:even", "--pipe=2", "--microbatches=3"),
            "schedule mine.py:even: Use an even number of microbatches.",
        ),
        ("schedule", ("--name=mine.py:eager",), "schedule mine.py:eager needs --pipe and --microbatches; only a table"),
        (
            "schedule",
            ("--name=mine.csv",),
            "there is no schedule 'mine.csv'. A table in a file is named file:mine.csv.",
        ),
        ("bubbles", ("--schedule=1f1c",), "there is no schedule '1f1c'. Did you mean '1f1b'?"),
        ("bubbles", ("--schedule=mine.py:eagr",), "schedule mine.py:eagr: mine.py has no function 'eagr'."),
        (
            "bubbles",
            ("--schedule=mine.py:even", "--pipe=2", "--microbatches=3"),
            "schedule mine.py:even: Use an even number of microbatches.",
        ),
        (
            "bubbles",
            ("--schedule=file:mine.csv", "--pipe=4"),
            "schedule file:mine.csv has other sizes: set --pipe=2 (not 4), or name a schedule that exists for any,",
        ),
        (
            "bubbles",
            ("--schedule=file:mine.csv", "--semantics=2bw"),
            "--schedule=file:mine.csv with --semantics=2bw: several sizes are compared, and a table has its own.",
        ),
        (
            "what_if",
            (*SMALL, "--topology=a100_80", "--change=schedule=mine.py:eagr"),
            "pipeline.schedule=mine.py:eagr with mesh.pipe=2, pipeline.num_chunks=1, pipeline.num_microbatches=4: "
            "schedule mine.py:eagr: mine.py has no function 'eagr'. Did you mean 'eager'?",
        ),
        ("plan", (*PLANNED, "--schedule=1f1c"), "there is no schedule '1f1c'. Did you mean '1f1b'?"),
        ("plan", (*PLANNED, "--schedule=auto"), "--schedule=auto: a schedule is searched for one layout. Plan without"),
        (
            "plan",
            (*PLANNED, "--schedule=file:mine.csv", "--global_batch_size=3"),
            "--schedule=file:mine.csv: no layout of 4 devices and data.global_batch_size=3 has such a schedule under "
            "sync. With pipe=2, chunks=1 and num_microbatches=3: ",
        ),
        ("plan", (*PLANNED, "--schedule=failing.py:mine"), "failing.py, line 2: ZeroDivisionError: division by zero"),
        (
            "train",
            (*SMALL, "--config.pipeline.schedule=mine.py:eagr", "--workdir=run"),
            "schedule mine.py:eagr: mine.py has no function 'eagr'. Did you mean 'eager'?",
        ),
        (
            "compile",
            (*SMALL, "--config.pipeline.schedule=mine.py"),
            "schedule mine.py: name a function of the file too, as in mine.py:eager.",
        ),
    ],
)
def test_mistakes(program, flags, message, folder):
    done = programs.call(program, *flags, status=2, cwd=folder)
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith(f"{program}.py: ")]) == 1
