"""The commands that a person wants next when a run has ended, with its workdir filled in."""

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from fiddlex.config import Config
from fiddlex.config.families import family
from fiddlex.data.corpus import corpus_tokenizer
from fiddlex.train.run.best import DIRECTORY

_PROMPTS = {"stdlib": "def "}  # by data.source; other runs begin with the start of a document


def next_commands(config: Config, workdir: Path, *, program: str) -> list[str]:
    """A heading and the commands, as lines; empty when the run has left nothing that a command could read.

    `program` is `sys.argv[0]` of the run, `fiddlex train` or the path of `train.py`.
    """
    where = f"--workdir={shlex.quote(str(workdir))}"
    lines = []
    if any((workdir / name).is_dir() for name in ("checkpoints", DIRECTORY)):
        lines.append(f"{_command('evaluate', program)} {where}")
        goes_on = config.model.task == "lm" and family(config.model.family).attends
        if goes_on and corpus_tokenizer(config.data, config.model.vocab_size) is not None:
            prompt = _PROMPTS.get(config.data.source)
            lines.append(f"{_command('generate', program)} {where}" + (f" --prompt={prompt!r}" if prompt else ""))
    events = workdir / "tensorboard"
    if any(events.glob("events.*")):
        install = "" if importlib.util.find_spec("tensorboard") else "  # pip install tensorboard"
        lines.append(f"tensorboard --logdir={shlex.quote(str(events))}{install}")
    return ["Next:", *(f"  {line}" for line in lines)] if lines else []


def _command(name: str, program: str) -> str:
    """The command line of another command, started as this one was."""
    if not program.endswith(".py"):
        return f"fiddlex {name}"
    python, here = sys.executable, os.getcwd()
    if python.startswith(f"{here}/"):
        python = os.path.relpath(python)
    return shlex.join([python, os.path.join(os.path.dirname(program), f"{name}.py")])
