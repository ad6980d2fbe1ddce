"""Runs the programs of `experiments/` as a user does, each in a process of its own that starts in milliseconds.

A server that has imported what the programs import (and has not started jax) forks for each run, so that a test pays
for the program and not for its imports. The process is real: it has its own flags, signals, exit status, standard
streams and fake devices. What differs from a start by hand: nothing is imported anew and interpreter shutdown is
skipped. `tests/test_binaries.py` also starts each program in a fresh interpreter, to show its help, and `train.py` to
train.
"""

import contextlib
import multiprocessing
import os
import pathlib
import re
import runpy
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import jax

ROOT = pathlib.Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
_IMPORTS = [
    "fiddlex.train.loop",
    "fiddlex.xla.ahead_of_time",
    "fiddlex.terminal.command_line",
    "fiddlex.planner.report",
    "fiddlex.planner.search",
    "fiddlex.tools.what_if",
    "fiddlex.simulate.plots",
    "tokenizers",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTS)


def without_waits(log: str) -> str:
    """A log without the lines that only a slow machine adds: of phases above 15 s, and of XLA's threads that wait."""
    return re.sub(
        r"^.*(\S  (?:\d+ min )?\d+ s|\] This thread (has been|is unstuck) waiting .*)\n", "", log, flags=re.MULTILINE
    )


class Ended(NamedTuple):
    """A program that has ended: its exit status (−N when signal N killed it), and what it wrote.

    Standard error has no lines that only a slow machine adds (`without_waits`).
    """

    returncode: int
    stdout: str
    stderr: str


class Running:
    """A program that runs.

    Attributes:
      process: its process.
    """

    def __init__(self, process: BaseProcess, folder: pathlib.Path):
        self.process, self._folder = process, folder

    def wait(self, timeout_s: float = 300) -> Ended:
        """Waits for its end; kills it and raises TimeoutError when that takes too long."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"runs for more than {timeout_s} s:\n{self._text('stderr')}")
        return Ended(self.process.exitcode, self._text("stdout"), without_waits(self._text("stderr")))

    def _text(self, stream: str) -> str:
        return (self._folder / stream).read_text(encoding="utf-8")


@contextlib.contextmanager
def started(
    program: str | pathlib.Path,
    *arguments: object,
    cwd: str | pathlib.Path = "/",
    environment: Mapping[str, str] | None = None,
    strict: bool = False,
) -> Iterator[Running]:
    """Starts a program; leaving the context kills it if it still runs.

    Args:
      program: its name in `experiments/`, the path of any Python file, a module as in `experiments.published`, or
        `fiddlex`, the command.
      *arguments: of its command line.
      cwd: its working directory.
      environment: variables to set besides this process's own; those that jax reads when it is imported have no effect.
      strict: whether warnings are errors.
    """
    if isinstance(program, str) and "." not in program and program != "fiddlex":
        program = EXPERIMENTS / f"{program}.py"
    with tempfile.TemporaryDirectory() as folder:
        call = (program, list(map(str, arguments)), str(cwd), dict(environment or {}), folder, strict)
        process = _context.Process(target=_run, args=call)
        process.start()
        try:
            yield Running(process, pathlib.Path(folder))
        finally:
            process.kill()
            process.join()


def call(
    program: str | pathlib.Path, *arguments: object, status: int = 0, timeout_s: float = 300, **options: object
) -> Ended:
    """Runs a program to its end, and asserts that it exits with `status` and shows no traceback; see `started`."""
    with started(program, *arguments, **options) as running:  # type: ignore[arg-type]
        done = running.wait(timeout_s)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def _run(
    program: str | pathlib.Path, arguments: list[str], cwd: str, environment: dict[str, str], folder: str, strict: bool
) -> None:
    """The forked process, which becomes the program."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
    os.environ.update(environment)
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # otherwise libtpu, if installed, warns of no TPU
    os.chdir(cwd)
    sys.argv = [str(program), *arguments]
    if strict:
        warnings.simplefilter("error")
    status: object = 0
    try:
        if isinstance(program, str):
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(program.parent))
            runpy.run_path(str(program), run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
