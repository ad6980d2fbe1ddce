"""The flags of `experiments/schedule.py`: mistakes, formats, and files that it writes."""

import json
import subprocess
import sys

import pytest

from tests.programs import ROOT
from tests.test_schedule_binaries import BINARY, COMPARE, call, sizes


def test_help_has_the_flags_and_no_fields_of_a_config():
    text = call("--help").stdout
    assert "\n  --microbatches " in text
    assert "mesh.pipe" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--name is required: "),
        (["--name=1f1c", "--pipe=4", "--microbatches=8"], "there is no schedule '1f1c'. Did you mean '1f1b'?"),
        (["--name=auto", "--pipe=4"], "schedule auto needs --pipe and --microbatches"),
        (sizes("auto", 4, 0, 8), "schedule auto: --chunks=0 must be at least 1."),
        ([*sizes("auto", 4, 2, 8), "--cap=0.5"], "schedule auto: a cap of 0.5 on rank 0 is below 1: a microbatch goes"),
        ([*sizes("auto", 4, 2, 8), "--cap=nan"], "--cap=nan must be greater than 0 and below"),
        ([*sizes("auto", 4, 1, 8), "--costs=forward=0"], "F of stage 0 takes 0; a search needs times above 0"),
        ([*sizes("auto", 4, 1, 8), "--semantics=2bw"], "--name=auto finds schedules that are flushed after each batch"),
        ([*sizes("auto", 4, 1, 8), "--order=strict"], "an order of their own: leave out --order=strict"),
        ([*sizes("1f1b", 4, 1, 8), "--cap=3"], "--cap=3 changes nothing without --name=auto: leave it out."),
        (["--name=1f1b", "--pipe=4"], "schedule 1f1b needs --pipe and --microbatches; only a table has"),
        (sizes("1f1b", 4, 2, 8), "schedule 1f1b has other sizes: set --chunks=1 (not 2)."),
        (sizes("1f1b", 0, 1, 8), "schedule 1f1b: --pipe=0 must be at least 1."),
        (sizes("interleaved_1f1b", 4, 2, 6), "Use 4 or 8 microbatches"),
        (["--name=file:nothing.csv"], "nothing.csv cannot be read"),
        ([*sizes("1f1b", 2, 1, 2), "--costs=forward=1:2:3"], "costs: forward has 3 times for 2 stages"),
        ([*sizes("1f1b", 2, 1, 2), "--costs=forwards=1"], "Did you mean 'forward'?"),
        ([*sizes("1f1b", 2, 1, 2), "--format=svg"], "--format=svg needs --output"),
        ([*sizes("1f1b", 2, 1, 2), "--format=gif"], "gif"),
        (
            [*sizes("1f1b", 2, 1, 2), "--output=a.gif"],
            "--output=a.gif: no format has the ending .gif. Use one of .txt,",
        ),
        (
            [*sizes("1f1b", 2, 1, 2), "--output=a.PNG", "--format=text"],
            "--format=text contradicts --output=a.PNG, whose",
        ),
        (
            [*COMPARE, "--name=1f1b"],
            "--name=1f1b and --compare=1f1b,interleaved_1f1b@2,zb_v,1f1c: show one schedule or",
        ),
        ([*COMPARE, "--semantics=2bw"], "with everything on the devices: leave out --semantics=2bw, or show one"),
        ([*COMPARE, "--stash_memory=host"], "leave out --stash_memory=host, or"),
        ([*COMPARE, "--weights_memory=host"], "leave out --weights_memory=host, or"),
        ([*COMPARE, "--layers_per_chunk=2"], "leave out --layers_per_chunk=2, or"),
        ([*COMPARE, "--costs=spill=1"], "leave out load, store and spill of --costs, or"),
        ([*COMPARE, "--output=a.csv"], "csv is the format of one schedule: give --name instead of --compare, or"),
        (
            ["--compare=1f1b,,zb_v"],
            "--compare=1f1b,,zb_v must name each schedule once, separated by commas, as in 1f1b,",
        ),
        (["--compare=1f1b,1f1b"], "--compare=1f1b,1f1b must name each schedule once"),
        (["--compare="], "--compare= must name each schedule once"),
        (["--compare=1f1b,zb_v", "--pipe=2", "--microbatches=2", "--costs=forward=nan"], "costs: forward=nan must be"),
        *(
            (
                [*sizes("1f1b", 2, 1, 2), "--format=csv", flag],
                f"csv is the table of the actions of one batch, which {flag}",
            )
            for flag in (
                "--semantics=2bw",
                "--costs=hop=1",
                "--clock=lockstep",
                "--order=strict",
                "--stash_memory=host",
            )
        ),
        (
            [*sizes("1f1b", 2, 1, 2), "--semantics=2bw", "--clock=free_running", "--output=a.svg"],
            "--clock=free_running with --semantics=2bw: pictures of one batch after another are in lockstep.",
        ),
        ([*sizes("1f1b", 2, 1, 2), "--costs=spill=1"], "--costs: spill changes nothing without --stash_memory=host"),
        *(
            ([*sizes("1f1b", 2, 1, 2), "--clock=free_running", flag], f"{flag} changes nothing without the lockstep")
            for flag in ("--order=ahead", "--order=strict")
        ),
        (
            [*sizes("1f1b", 2, 1, 2), "--clock=free_running", "--costs=sharing=1:1.5"],
            "sharing of --costs changes nothing without the lockstep clock: leave it or --clock out.",
        ),
        (
            ["--compare=1f1b@1,zb_v@2", "--chunks=2", "--pipe=2", "--microbatches=2"],
            "--chunks=2 changes nothing: all of --compare=1f1b@1,zb_v@2 have a number of their own.",
        ),
        (
            ["--compare=auto@1,auto@2", "--order=strict", "--pipe=2", "--microbatches=2"],
            "an order of their own: leave out --order=strict",
        ),
        (["--pipe=four"], "four"),
    ],
)
def test_mistakes(arguments, message):
    done = call(*arguments, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith("schedule.py: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_a_table_that_breaks_a_rule_is_shown_with_the_culprit_marked(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n")
    done = call("--name=file:mine.csv", status=2, cwd=tmp_path)
    assert "rank 1  1F0 >1B1< 1F1  1B0" in done.stderr


@pytest.mark.parametrize(
    ("format", "start"),
    [
        ("svg", b"<?xml"),
        ("png", b"\x89PNG"),
        ("pdf", b"%PDF"),
        ("csv", b"0F0,0F1,"),
        ("json", b'{"name": "1f1b"'),
        ("text", b"1f1b: pipe=2"),
    ],
)
def test_the_format_follows_from_the_flag_or_from_the_ending_of_the_file(format, start, tmp_path):
    ending = "txt" if format == "text" else format
    for flags, file in (((f"--format={format}",), "any.9"), ((), f"any.{ending}")):
        done = call(*sizes("1f1b", 2, 1, 2), *flags, f"--output={tmp_path / file}")
        assert (done.stdout, done.stderr) == ("", f"{tmp_path / file} is written.\n")
        assert (tmp_path / file).read_bytes().startswith(start)


@pytest.mark.parametrize("order", ["strict", "ahead"])
def test_an_order_that_changes_nothing_is_told(order):
    flags = *sizes("zb_h1", 2, 1, 2), "--format=json"
    done = call(*flags, f"--order={order}")
    assert done.stderr.startswith(f"--order={order} changes nothing: schedule zb_h1 splits all backward passes into I")
    assert done.stdout == call(*flags).stdout
    assert call(*sizes("1f1b", 2, 1, 2), f"--order={order}").stderr == ""


def test_json_has_the_clocks_that_are_asked_for():
    for flags in (sizes("1f1b", 2, 1, 2), ["--compare=1f1b", "--pipe=2", "--microbatches=2"]):
        for clock, names in (("both", ["free_running", "lockstep"]), ("lockstep", ["lockstep"])):
            facts = json.loads(call(*flags, "--format=json", f"--clock={clock}").stdout)
            assert [
                name for name in facts.get("schedules", [facts])[0] if name in ("free_running", "lockstep")
            ] == names


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    done = call(*sizes("1f1b", 2, 1, 2), "--format=svg", f"--output={tmp_path}/file/a.svg", status=2)
    assert "file/a.svg cannot be written: File exists. Name a file in a folder that you may write to." in done.stderr


def test_a_picture_in_a_folder_that_is_not_there_yet(tmp_path):
    call(*sizes("1f1b", 2, 1, 2), f"--output={tmp_path}/new/a.svg")
    assert (tmp_path / "new" / "a.svg").read_text().startswith("<?xml")


def test_pictures_without_matplotlib_name_the_extra(tmp_path):
    hidden = f"import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = {[str(BINARY), *sizes('1f1b', 2, 1, 2)]}"
    arguments = f"; sys.argv += ['--format=svg', '--output={tmp_path}/a.svg']"
    code = f"{hidden}{arguments}; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pictures need matplotlib" in done.stderr
    assert "pip install 'fiddlex[plot]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_starts_without_jax_and_matplotlib():
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(BINARY)!r}); "
        "sys.exit(str({'jax', 'matplotlib'} & set(sys.modules)) if {'jax', 'matplotlib'} & "
        "set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
