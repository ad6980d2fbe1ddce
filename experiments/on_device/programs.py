"""Runs parts of a study in processes of their own, so that none holds the device's memory while another one runs."""

import json
import os
import subprocess
import sys
from typing import Any

from experiments.benchmarks.systems import ROOT
from fiddlex.errors import FiddlexError

_LAST_LINES = 12  # of what a program wrote, in the error when it failed


def run(command: list[str], *, device: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command on a device and returns when it has ended, with what it wrote.

    Args:
      command: the command line.
      device: `cpu` or `cuda`, for jax.
      **variables: further environment variables.
    """
    environment = dict(os.environ, JAX_PLATFORMS=device, XLA_PYTHON_CLIENT_PREALLOCATE="false") | variables
    return subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT, env=environment)


def answer_of(module: str, *arguments: str, device: str, **variables: str) -> Any:
    """The JSON value in the last line that a module of this repository prints, run as a program on a device.

    Raises:
      FiddlexError: when the program fails; the message has the last lines that it wrote.
    """
    done = run([sys.executable, "-m", module, *arguments], device=device, **variables)
    if done.returncode or not done.stdout.strip():
        raise FiddlexError(f"{module} ended with status {done.returncode}. The last that it wrote:\n{last(done)}")
    return json.loads(done.stdout.splitlines()[-1])


def last(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines that a program wrote."""
    return "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
