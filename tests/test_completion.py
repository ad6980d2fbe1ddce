"""What shells offer after `fiddlex …`: the candidates, and the script in real shells, as far as they are installed."""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fiddlex.commands import summaries
from fiddlex.config import Config
from fiddlex.config.files import config_names
from tests.programs import ROOT

COMMANDS = {name for name, _ in summaries()}
WORD_BREAKS = " \t\n\"'><=;|&(:"  # bash's own

ELASTIC, FORCE = ("--elastic", "--noelastic"), ("--force", "--noforce")
PROCESSES = ("--coordinator_address=", "--num_processes=", "--process_id=", "--join_timeout_s=", "--fake_devices=")


# Answers each line in a child of its own, so that what fiddlex imports of libraries is imported once.
SERVER = """
import os, sys
sys.modules["jax"] = None
import fiddlex.completion, fiddlex.planner.auto_plans, fiddlex.simulate.page, fiddlex.terminal.command_line
from fiddlex.__main__ import main
for request in sys.stdin:
    line, folder, output = request.rstrip("\\n").split("\\0")
    if not (child := os.fork()):
        os.chdir(folder)
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": output}
        main()
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def server() -> subprocess.Popen[str]:
    environment = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_COMP_WORDBREAKS": WORD_BREAKS}
    environment |= {"_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.kill)
    return started


def candidates(line: str, folder: pathlib.Path) -> set[str]:
    """What fiddlex offers for the line, as bash's script asks for it; bash replaces the word after its last break."""
    output = folder.parent / "candidates"
    to_server, from_server = server().stdin, server().stdout
    assert to_server is not None
    assert from_server is not None
    to_server.write(f"{line}\0{folder}\0{output}\n")
    to_server.flush()
    assert from_server.readline() == "0\n"
    return set(output.read_text().splitlines())


@pytest.fixture
def folder(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text("ARGUMENTS = ('deep',)\n\ndef get_config(depth):\n    pass\n")
    (here / "text.txt").write_text("")
    (here / "runs").mkdir()
    return here


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("", {*COMMANDS, "--help", "--version"}),
        ("tra", {"train"}),
        ("train --", {"--help", "--config=", "--workdir=", "--format=", *ELASTIC, *FORCE, *PROCESSES}),
        ("train --f", {"--force", "--format=", "--fake_devices="}),
        ("train --config=gpt2", {"gpt2_small", "gpt2_medium", "gpt2_large", "gpt2_xl"}),
        ("train --config=", {*config_names(), "mine.py", "runs/"}),
        ("train --config ll", {"llama"}),
        ("train --config=llama:", {"1b", "8b", "70b"}),
        ("train --config=gpt_tiny:", {"2bw"}),
        ("train --config=mine.py:", {"deep"}),
        ("train --config=nothing:", set()),
        ("train --config=gpt2_xl:", set()),
        ("train --config=huggingface:r", {"runs/"}),
        ("train --config.mesh.p", {"--config.mesh.pipe="}),
        ("train --config=gpt_tiny --config.mesh.s", {"--config.mesh.sequence_parallel"}),
        ("train --noconfig.mesh.s", {"--noconfig.mesh.sequence_parallel"}),
        ("train --config.optimizer.name=ad", {"adamw", "adam", "adan", "adafactor"}),
        ("train --config.model.num_layers=", set()),
        ("train --config.data.source=t", {"text:", "tokens:", "tsv:"}),
        ("train --config.data.source=text:te", {"text.txt"}),
        ("train --config.train.init_from=r", {"runs/"}),
        ("train --workdir=", {"mine.py", "text.txt", "runs/"}),
        ("train --format=", {"text", "json"}),
        ("evaluate --config.train.see", {"--config.train.seed="}),
        ("generate --num_tokens=", set()),
        ("schedule --name=zb", {"zb_h1", "zb_h2", "zb_v"}),
        ("schedule --name=file:t", {"text.txt"}),
        ("schedule --name=m", {"mine.py"}),
        ("schedule --compare=1f1b,zb_h", {"1f1b,zb_h1", "1f1b,zb_h2"}),
        ("schedule --semantics=d", {"delay:"}),
        ("plan --topology=a100", {"a100_40", "a100_80"}),
        ("completion ", {"bash", "zsh", "fish", "--help"}),
        ("checkpoint v", {"verify"}),
        ("checkpoint verify r", {"runs/"}),
        ("launch s", {"slurm", "ssh"}),
        ("launch slurm --config=gpt_ti", {"gpt_tiny"}),
        ("launch slurm --topology=a100", {"a100_40", "a100_80"}),
        ("launch jobset --num_s", {"--num_slices="}),
        ("launch local --el", {"--elastic"}),
    ],
)
def test_candidates(line, offered, folder):
    assert candidates(f"fiddlex {line}", folder) == offered


def test_every_field_of_a_config_is_offered(folder):
    fields = {f"{section}.{field}" for section, values in json.loads(Config().to_json()).items() for field in values}
    offered = candidates("fiddlex train --config.", folder)
    assert {option.removeprefix("--config.").removesuffix("=") for option in offered} == fields


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(fiddlex completion bash)"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u; source <(fiddlex completion zsh)"),
    "fish": (["fish", "--no-config", "-i"], "fiddlex completion fish | source"),
}


@contextlib.contextmanager
def terminal(shell: str, folder: pathlib.Path) -> Iterator[int]:
    """Yields a pseudo-terminal with a shell that has loaded its script and finds `fiddlex`."""
    program = folder.parent / "bin" / "fiddlex"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom fiddlex.__main__ import main\n\nmain()\n")
    program.chmod(0o755)
    command, script = SHELLS[shell]
    path = f"{program.parent}:{os.environ['PATH']}"
    changes = {"PATH": path, "HOME": str(folder), "TERM": "dumb", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    end, other = pty.openpty()
    # `setsid --ctty` makes the pseudo-terminal the shell's own; to fork here is not safe once jax has started threads.
    line = ["setsid", "--ctty", *command]
    process = subprocess.Popen(line, cwd=folder, env=os.environ | changes, stdin=other, stdout=other, stderr=other)
    os.close(other)
    try:
        os.write(end, f"{script}; echo rea'dy'\n".encode())  # the shell echoes the line with the quotes
        read_until(r"ready", end)
        yield end
    finally:
        process.kill()
        process.wait()
        os.close(end)


def read_until(pattern: str, end: int, limit_s: float = 30) -> re.Match[str]:
    """Reads what the terminal shows until it holds the pattern."""
    shown, deadline = "", time.monotonic() + limit_s
    while not (match := re.search(pattern, shown)):
        ready, _, _ = select.select([end], [], [], max(deadline - time.monotonic(), 0))
        assert ready, shown
        shown += os.read(end, 4096).decode(errors="replace")
    return match


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell, folder):
    if missing := [program for program in (shell, "setsid") if not shutil.which(program)]:
        pytest.skip(f"{missing[0]} is not installed")
    lines = {
        "fiddlex tra": "fiddlex train",
        "fiddlex train --workd": "fiddlex train --workdir=",
        "fiddlex train --config=gpt_ti": "fiddlex train --config=gpt_tiny",
        "fiddlex train --config=llama:7": "fiddlex train --config=llama:70b",
        "fiddlex plan --config.pipeline.num_m": "fiddlex plan --config.pipeline.num_microbatches=",
        "fiddlex train --config=min": "fiddlex train --config=mine.py",
        "fiddlex schedule --name=inter": "fiddlex schedule --name=interleaved_1f1b",
    }
    with terminal(shell, folder) as end:
        for line, completed in lines.items():
            os.write(end, f"{line}\t\x01echo got: \x05,end\n".encode())  # to the start of the line, and to its end
            assert read_until(r"\ngot: (.*),end", end)[1] in (completed, f"{completed} "), line
