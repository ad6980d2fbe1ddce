"""train.py in a process that something is wrong with: the last flag, --fault=NAME, which tests give to one rank."""

import pathlib
import resource
import sys
import threading
import time
from typing import Any, NoReturn

import orbax.checkpoint as ocp

from fiddlex.commands.train import main
from fiddlex.data import Batch, Loader, corpus, token_cache, tokenizers
from fiddlex.terminal.command_line import run


def refuse(*arguments: object, **options: object) -> NoReturn:
    raise AssertionError("this process must not tokenize")


def tokenizes_nothing() -> None:
    corpus.encode_documents = refuse  # type: ignore[assignment]
    tokenizers.ByteTokenizer.encode_batch = refuse  # type: ignore[assignment,method-assign]


def sleeps_before_tokenizing() -> None:
    corpus.read_text = lambda path: time.sleep(60)  # type: ignore[assignment,return-value]


def is_impatient() -> None:
    token_cache.SILENCE_S = 2.0


def has_no_workdir() -> None:
    """Files that other processes have written are not there."""
    read_text = pathlib.Path.read_text

    def read(path: pathlib.Path, *arguments: Any, **options: Any) -> str:
        if path.name == ".probe":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read_text(path, *arguments, **options)

    pathlib.Path.read_text = read  # type: ignore[method-assign]
    give_up_early()


def give_up_early() -> None:
    from fiddlex.cluster import shared_files

    shared_files.SEEN_WITHIN_S = 1.0


def cannot_read_step_4() -> None:
    restore = ocp.Checkpointer.restore

    def failing(self: Any, directory: Any, *arguments: Any, **options: Any) -> Any:
        if str(directory).endswith("/4") and "weights" in options["args"]:
            raise OSError(5, "Input/output error", str(directory))
        return restore(self, directory, *arguments, **options)

    ocp.Checkpointer.restore = failing  # type: ignore[method-assign]


def full_disk() -> None:
    """No file may grow beyond some bytes from the second checkpoint on."""

    def limit() -> None:
        checkpoints = pathlib.Path(next(each for each in sys.argv if each.startswith("--workdir=")).partition("=")[2])
        while not (checkpoints / "checkpoints" / "2").is_dir():
            time.sleep(0.002)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    threading.Thread(target=limit, daemon=True).start()


def poisons_batch_6() -> None:
    batch = Loader.batch

    def poisoned(self: Loader, number: int) -> Batch:
        made = batch(self, number)
        return made | {"weights": made["weights"] * float("nan")} if number == 6 else made

    Loader.batch = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    fault = sys.argv.pop() if sys.argv[-1].startswith("--fault=") else ""
    if fault:
        globals()[fault.partition("=")[2]]()
    run(main)
