"""Makes PREFIX.bin and PREFIX.idx from files of text, in parallel, and goes on where an earlier run was stopped.

The input is cut into pieces. Processes encode them to parts in the folder PREFIX-parts; when all are complete, they are
joined in order. So the files need twice their size on disk for a while.

Invariant: the result has the same bytes whatever the number of processes and however often the work was stopped. A run
goes on only with the parts of the same input and options, which PREFIX-parts/plan.json records;
PREFIX-prepared.json records them beside the result.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fiddlex.data.megatron.builder import IndexedBuilder, smallest_dtype
from fiddlex.data.megatron.index_file import open_indexed
from fiddlex.data.preparation.encoding import Counts, Encoding, encode_part, part_path, read_counts, start_worker
from fiddlex.data.preparation.inputs import Piece, cut, find_files
from fiddlex.data.preparation.train_tokenizer import train_tokenizer
from fiddlex.data.tokenizers import SEPARATORS, make_tokenizer
from fiddlex.errors import ConfigError, DataError

_FORMAT = 1  # of the plan and the parts


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What to prepare.

    Attributes:
      inputs: files, folders and patterns (`find_files`).
      prefix: the path of the files to make, without .bin and .idx.
      tokenizer: 'bytes', or path of a JSON file of the tokenizers library.
      train_tokens: size of the vocabulary to train on the input, in place of `tokenizer`; 0: train none.
      json_key: key or column of the text.
      append_eod: whether to end each document with the tokenizer's separator.
    """

    inputs: Sequence[str]
    prefix: Path
    tokenizer: str = "bytes"
    train_tokens: int = 0
    json_key: str = "text"
    append_eod: bool = False

    @property
    def tokenizer_file(self) -> str:
        """The tokenizer that encodes the input: the one that is named, or that is trained."""
        return str(self._beside("-tokenizer.json")) if self.train_tokens else self.tokenizer

    @property
    def parts(self) -> Path:
        """The folder of the parts."""
        return self._beside("-parts")

    @property
    def record(self) -> Path:
        """The file that records how the result was made."""
        return self._beside("-prepared.json")

    @property
    def results(self) -> tuple[Path, Path]:
        """PREFIX.bin and PREFIX.idx."""
        return self._beside(".bin"), self._beside(".idx")

    def _beside(self, end: str) -> Path:
        return self.prefix.with_name(self.prefix.name + end)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What was made.

    Attributes:
      counts: documents, tokens and what was left out.
      vocab_size: tokens of the vocabulary.
      tokenizer: 'bytes', or path of the tokenizer.
    """

    counts: Counts
    vocab_size: int
    tokenizer: str


Progress = Callable[[int, int], None]  # takes the bytes of input that are done, now and in all


def prepare(task: Preparation, *, workers: int, progress: Progress = lambda done, total: None) -> Prepared:
    """Makes the files, or goes on making them; files of the same task that are complete are left as they are.

    Args:
      task: what to prepare.
      workers: processes that encode.
      progress: is called at the start with the bytes of input that earlier runs have done, and after each piece.

    Raises:
      ConfigError: when options contradict each other or the files that are there.
      DataError: when the input is missing or damaged, or the tokenizer is.
      OSError: when a file cannot be read or written.
    """
    if task.train_tokens and task.tokenizer != "bytes":
        raise ConfigError(f"--train_tokenizer={task.train_tokens} and --tokenizer={task.tokenizer}: leave one out.")
    if workers < 1:
        raise ConfigError(f"--workers={workers} must be at least 1.")
    task.prefix.parent.mkdir(parents=True, exist_ok=True)
    files = find_files(task.inputs)
    plan = _plan(task, files)
    if task.record.exists() and (done := _finished(task, plan)):
        shutil.rmtree(task.parts, ignore_errors=True)
        return done
    task.parts.mkdir(exist_ok=True) if _is_ours(task, plan) else _start(task, plan)
    try:
        with FileLock(task.parts / "lock", timeout=0):
            return _prepare(task, plan, cut(files), workers, progress)
    except Timeout as error:
        raise ConfigError(f"another process is making {task.prefix}. Wait until it ends, or stop it.") from error


def _prepare(
    task: Preparation, plan: dict[str, Any], pieces: list[Piece], workers: int, progress: Progress
) -> Prepared:
    if task.train_tokens and not os.path.exists(task.tokenizer_file):
        train_tokenizer(pieces, Path(task.tokenizer_file), num_tokens=task.train_tokens, json_key=task.json_key)
    tokenizer = make_tokenizer(task.tokenizer_file)
    if task.append_eod and tokenizer.separator is None:
        raise ConfigError(f"--append_eod: {task.tokenizer_file} has none of the tokens {', '.join(SEPARATORS)}.")
    encoding = Encoding(task.tokenizer_file, task.json_key, task.append_eod)
    counts = [read_counts(task.parts, number) for number in range(len(pieces))]
    missing = [number for number, count in enumerate(counts) if count is None]
    total = sum(piece.num_bytes for piece in pieces)
    done = total - sum(pieces[number].num_bytes for number in missing)
    progress(done, total)
    for number, count in _encoded(task.parts, pieces, missing, encoding, workers):
        counts[number] = count
        done += pieces[number].num_bytes
        progress(done, total)
    summed = sum((count for count in counts if count is not None), Counts())
    if not summed.tokens:
        raise DataError(f"--input={','.join(task.inputs)} has no text.")
    merged = task.parts / "merged"
    with IndexedBuilder(merged, dtype=smallest_dtype(tokenizer.vocab_size)) as builder:
        for number in range(len(pieces)):
            builder.add_dataset(part_path(task.parts, number))
    for end, result in zip((".bin", ".idx"), task.results, strict=True):
        os.replace(merged.with_name(merged.name + end), result)
    prepared = Prepared(summed, tokenizer.vocab_size, task.tokenizer_file)
    _write_json(task.record, {"plan": plan, "prepared": dataclasses.asdict(prepared)})
    shutil.rmtree(task.parts, ignore_errors=True)
    return prepared


def _encoded(
    folder: Path, pieces: Sequence[Piece], numbers: Sequence[int], encoding: Encoding, workers: int
) -> Iterator[tuple[int, Counts]]:
    """Encodes the pieces `numbers` and yields the counts of each when it is complete."""
    if min(workers, len(numbers)) <= 1:
        for number in numbers:
            yield number, encode_part(pieces[number], folder, number, encoding)
        return
    pool = ProcessPoolExecutor(min(workers, len(numbers)), mp_context=get_context("spawn"), initializer=start_worker)
    try:
        running = {pool.submit(encode_part, pieces[n], folder, n, encoding): n for n in numbers}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that encodes has ended, perhaps for lack of memory. The same command goes on; use fewer "
            "--workers."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _plan(task: Preparation, files: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    """All that decides the result."""
    digest = ""
    if not task.train_tokens and task.tokenizer != "bytes":
        make_tokenizer(task.tokenizer)  # tells what is wrong with it
        digest = hashlib.sha256(Path(os.path.expanduser(task.tokenizer)).read_bytes()).hexdigest()
    listed = "\n".join(
        f"{os.path.abspath(file)} {passes} {os.stat(file).st_size} {os.stat(file).st_mtime_ns}"
        for file, passes in files
    )
    return {
        "format": _FORMAT,
        "inputs": list(task.inputs),
        "files": hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest(),
        "tokenizer": digest or "bytes",
        "train_tokens": task.train_tokens,
        "json_key": task.json_key,
        "append_eod": task.append_eod,
    }


def _finished(task: Preparation, plan: dict[str, Any]) -> Prepared | None:
    """What an earlier run of the same task has completed; None when its files are gone or of another task."""
    record = _read_json(task.record)
    if record.get("plan") != plan or not all(file.exists() for file in task.results):
        return None
    open_indexed(task.prefix)
    made = record["prepared"]
    return Prepared(Counts(**made["counts"]), made["vocab_size"], made["tokenizer"])


def _is_ours(task: Preparation, plan: dict[str, Any]) -> bool:
    """Whether an earlier run of the same task has left parts; raises ConfigError when they are of another."""
    file = task.parts / "plan.json"
    if not file.exists():
        return False
    changed = [name for name, value in plan.items() if _read_json(file).get(name) != value]
    if changed:
        raise ConfigError(
            f"{task.parts} has the parts of another preparation: {', '.join(changed)} of the input or options changed. "
            "Give the same command to go on, remove the folder, or name another --output_prefix."
        )
    return True


def _start(task: Preparation, plan: dict[str, Any]) -> None:
    trained = [Path(task.tokenizer_file)] if task.train_tokens else []
    for file in (*task.results, task.record, *trained):
        if file.exists():
            raise ConfigError(
                f"{file} exists and was made from other input or with other options. Name another --output_prefix, or "
                "remove the files of this one."
            )
    task.parts.mkdir(exist_ok=True)
    _write_json(task.parts / "plan.json", plan)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)
