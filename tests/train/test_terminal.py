"""`fiddlex train` in a terminal of 80 columns: what a person sees, and what Ctrl-C does in each phase."""

import pathlib
import shutil
import sys
from collections.abc import Callable

import pytest

from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from tests.pseudo_terminal import Recording, recorded
from tests.small_run import ENVIRONMENT, small, steps

COLUMNS = 80
AT_ONCE_S = 5.0  # less than one second on an idle machine (docs/time.md); the machine may be busy
# `gpt_tiny` as it is but for its length. It is compiled anew each time, so that compiling takes a while.
SHORT = {
    "train.num_steps": 8,
    "train.log_every": 1,
    "train.eval_every": 8,
    "train.checkpoint_every": 4,
    "train.sample_tokens": 100,
    "train.compilation_cache": "",
    "optimizer.warmup_steps": 2,
    "data.eval_batches": 60,
}


def train_line(workdir: pathlib.Path, values: dict[str, object]) -> list[str]:
    overrides = [f"--config.{name}={value}" for name, value in values.items()]
    return [sys.executable, "-m", "fiddlex", "train", "--config=gpt_tiny", f"--workdir={workdir}", *overrides]


def assert_no_line_wraps(shown: Recording) -> None:
    """A line of the log may be longer only for a path that cannot be divided, and a command only for its workdir."""
    for line in [*shown.last_lines, *shown.lines]:
        assert len(line) <= COLUMNS or " " not in line.strip() or line.startswith("  "), line


def test_a_small_run(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    values = small(text_file, train_num_steps=6, train_eval_every=6, train_sample_tokens=5)
    workdir = tmp_path / "run"
    with recorded(train_line(workdir, values), ENVIRONMENT) as shown:
        shown.follow_to("Importing jax")
        assert shown.ended() == 0
    assert_no_line_wraps(shown)
    assert "\n".join(shown.lines).partition("\nNext:\n")[2].splitlines() == [
        f"  fiddlex evaluate --workdir={workdir}",
        f"  fiddlex generate --workdir={workdir}",
        f"  tensorboard --logdir={workdir}/tensorboard  # pip install tensorboard",
    ]
    assert "libtpu" not in "\n".join(shown.lines)
    assert not (workdir / "libraries.log").exists()


def test_ctrl_c_while_jax_is_imported(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    workdir = tmp_path / "run"
    with recorded(train_line(workdir, small(text_file)), ENVIRONMENT) as shown:
        shown.follow_to("Importing jax")
        status, seconds = shown.interrupted()
    assert (status, shown.lines[-1].removeprefix("^C")) == (130, "fiddlex train: interrupted.")
    assert seconds < AT_ONCE_S
    assert not shown.cursor_is_hidden
    assert not workdir.exists()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Recording]:
    """The workdir of a run that has ended after four steps, and what it has shown."""
    workdir = tmp_path_factory.mktemp("terminal") / "run"
    values = SHORT | {"train.num_steps": 4, "train.eval_every": 4}
    with recorded(train_line(workdir, values), ENVIRONMENT) as shown:
        assert shown.ended() == 0
    return workdir, shown


@pytest.mark.long
def test_the_phases_of_a_run(begun: tuple[pathlib.Path, Recording]) -> None:
    shown = begun[1]
    assert_no_line_wraps(shown)
    found = [phase for phase in shown.phases() if phase not in ("Starting", "Building", "Reading", "Writing")]
    order = ["Importing", "Tracing", "Compiling", "Making", "Training", "Saving", "Evaluating", "Sampling"]
    assert [phase for phase in order if phase in found] == order
    assert [found.index(phase) for phase in order] == sorted(found.index(phase) for phase in order)
    assert any(" left" in line for line in shown.last_lines if line.startswith("Evaluating"))
    assert "Next:" in shown.lines


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "at_once"),
    [
        ("Tracing", True),
        ("Compiling the train step", True),
        ("Training", False),
        ("Evaluating", False),
        ("Saving", False),
        ("Sampling", True),
    ],
)
def test_ctrl_c_in_each_phase(
    phase: str,
    at_once: bool,
    begun: tuple[pathlib.Path, Recording],
    tmp_path: pathlib.Path,
    record_property: Callable[[str, object], None],
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(begun[0], workdir)
    with recorded(train_line(workdir, SHORT), ENVIRONMENT) as shown:
        shown.follow_to(phase)
        status, seconds = shown.interrupted()
    record_property("seconds", seconds)
    assert status == 130, "\n".join(shown.lines)
    assert_no_line_wraps(shown)
    assert not shown.cursor_is_hidden
    if at_once:
        assert seconds < AT_ONCE_S
    reached = Checkpoints(workdir).steps()
    assert 4 in reached  # what there was is whole
    assert reached[-1] == max(steps(workdir))  # what the run has done is saved
    if phase == "Evaluating":
        assert "The evaluation at step 8 is left for when the run goes on." in shown.lines
        with recorded(train_line(workdir, SHORT), ENVIRONMENT) as shown:
            assert shown.ended() == 0
        assert any(line.startswith("step 8/8  held-out loss") for line in shown.lines)
