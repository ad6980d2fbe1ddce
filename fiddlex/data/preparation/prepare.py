"""Makes PREFIX.bin and PREFIX.idx from files of text, in parallel, and goes on where an earlier run was stopped.

Processes encode pieces of the input to parts in the folder PREFIX-parts; when all are complete, they are joined in
order. So the files need twice their size on disk for a while.

Invariant: the result has the same bytes whatever the number of processes and however often the work was stopped. A run
goes on only with the parts of the same input and options, which PREFIX-parts/plan.json records; PREFIX-prepared.json
records them beside the result.
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fiddlex.data.megatron.builder import indexed_builder, smallest_dtype
from fiddlex.data.megatron.index_file import open_indexed
from fiddlex.data.preparation.encoding import Counts, Encoding, encode_part, part_path, read_counts, start_worker
from fiddlex.data.preparation.inputs import Piece, cut, find_files
from fiddlex.data.preparation.train_tokenizer import check_size, train_tokenizer
from fiddlex.data.tokenizers import MOST_UNKNOWN, SEPARATORS, Tokenizer, make_tokenizer
from fiddlex.errors import ConfigError, DataError
from fiddlex.files.small_files import read_object
from fiddlex.files.whole_files import write_whole

logger = logging.getLogger(__name__)

_FORMAT = 3  # of the plan and the parts
MOST_NAME_BYTES = 230  # of a file's name; most file systems allow 255, and temporary files have longer names


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What to prepare."""

    inputs: Sequence[str]  # files, folders and patterns (`find_files`)
    prefix: Path  # of the files to make, without .bin and .idx
    tokenizer: str = "bytes"  # 'bytes', or path of a JSON file of the tokenizers library
    train_tokens: int = 0  # size of the vocabulary to train on the input, in place of `tokenizer`; 0: train none
    json_key: str = "text"  # key or column of the text
    append_eod: bool = False  # whether to end each document with the tokenizer's separator

    @property
    def tokenizer_file(self) -> str:
        return str(self.trained_tokenizer) if self.train_tokens else self.tokenizer

    @property
    def trained_tokenizer(self) -> Path:
        return self._beside("-tokenizer.json")

    @property
    def parts(self) -> Path:
        return self._beside("-parts")

    @property
    def record(self) -> Path:
        return self._beside("-prepared.json")

    @property
    def lock(self) -> Path:
        return self._beside(".lock")

    @property
    def results(self) -> tuple[Path, Path]:
        return self._beside(".bin"), self._beside(".idx")

    def owns(self, file: str) -> bool:
        """Whether the preparation itself makes `file`, so that it is no input."""
        path = Path(os.path.abspath(file))
        trained = [self.trained_tokenizer] if self.train_tokens else []
        made = path.parent == self.prefix.parent and any(
            path.name in (own.name, f"{own.name}.tmp")  # the second while it is written
            for own in (self.record, self.lock, *self.results, *trained)
        )
        return made or self.parts in path.parents

    def find_files(self) -> list[tuple[str, bool]]:
        return [(file, in_folder) for file, in_folder in find_files(self.inputs) if not self.owns(file)]

    def _beside(self, end: str) -> Path:
        return self.prefix.with_name(self.prefix.name + end)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What was made."""

    counts: Counts
    vocab_size: int
    tokenizer: str  # 'bytes', or path of the tokenizer


Progress = Callable[[int, int], None]  # takes the bytes of input that are done, now and in all


def prepare(task: Preparation, *, workers: int, progress: Progress = lambda done, total: None) -> Prepared:
    """Makes the files, or goes on making them; files of the same task that are complete are left as they are.

    `progress` is called at the start, with the bytes of input that earlier runs have done, and after each piece.

    Raises:
      ConfigError: when options contradict each other or the files that are there.
      DataError, OSError: when the input or the tokenizer is missing or damaged, or a file cannot be read or written.
    """
    if task.train_tokens and task.tokenizer != "bytes":
        raise ConfigError(f"--train_tokenizer={task.train_tokens} and --tokenizer={task.tokenizer}: leave one out.")
    if workers < 1:
        raise ConfigError(f"--workers={workers} must be at least 1.")
    if task.prefix.suffix in (".bin", ".idx"):
        raise ConfigError(f"--output_prefix={task.prefix}: give it without {task.prefix.suffix}, which is added.")
    if not task.prefix.name or len(os.fsencode(task.record.name)) > MOST_NAME_BYTES:
        raise ConfigError(
            f"--output_prefix={task.prefix}: the last part of the path, to which endings such as -prepared.json are "
            f"added, must be a name, with them of at most {MOST_NAME_BYTES} bytes."
        )
    if task.train_tokens:
        check_size(task.train_tokens)
    else:
        _require_separator(task, make_tokenizer(task.tokenizer))
    files = task.find_files()
    plan = _plan(task, files)
    task.prefix.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(task.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(f"another process is making {task.prefix}. Wait until it ends, or stop it.") from error
    try:
        if task.record.exists() and (done := _finished(task, plan)):
            shutil.rmtree(task.parts, ignore_errors=True)
            return done
        if not _is_ours(task, plan):
            _start(task, plan)
        return _prepare(task, plan, cut(files), workers, progress)
    finally:
        task.lock.unlink(missing_ok=True)
        lock.release()


def _prepare(
    task: Preparation, plan: dict[str, Any], pieces: list[Piece], workers: int, progress: Progress
) -> Prepared:
    if task.train_tokens:
        _train(task, pieces)
    tokenizer = make_tokenizer(task.tokenizer_file)
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
        _discard(task)
        raise DataError(f"--input={','.join(task.inputs)} has no text. Name files that have some.")
    if _plan(task, task.find_files()) != plan:
        _discard(task)
        raise DataError(
            f"--input={','.join(task.inputs)} or the tokenizer has changed while it was read, and nothing was written. "
            "Run the same command again."
        )
    if summed.unknown > MOST_UNKNOWN * summed.tokens:
        logger.warning(
            "Of %s tokens %.1f%% are the unknown token of --tokenizer=%s, which was made for other text. Train one on "
            "this text (--train_tokenizer), or name another.",
            *(f"{summed.tokens:,}", 100 * summed.unknown / summed.tokens, task.tokenizer_file),
        )
    merged = task.parts / "merged"
    with indexed_builder(merged, dtype=smallest_dtype(tokenizer.vocab_size)) as builder:
        for number in range(len(pieces)):
            builder.add_dataset(part_path(task.parts, number))
    for end, result in zip((".bin", ".idx"), task.results, strict=True):
        os.replace(merged.with_name(merged.name + end), result)
    prepared = Prepared(summed, tokenizer.vocab_size, task.tokenizer_file)
    record = {"plan": plan, "prepared": dataclasses.asdict(prepared), "tokenizer": _digest(task.tokenizer_file)}
    _write_json(task.record, record)
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
    digest = "bytes" if task.train_tokens else _digest(task.tokenizer)
    listed = "\n".join(
        f"{os.path.abspath(file)} {passes} {os.stat(file).st_size} {os.stat(file).st_mtime_ns}"
        for file, passes in files
    )
    return {
        "format": _FORMAT,
        "inputs": list(task.inputs),
        "files": hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest(),
        "tokenizer": digest,
        "train_tokens": task.train_tokens,
        "json_key": task.json_key,
        "append_eod": task.append_eod,
    }


def _finished(task: Preparation, plan: dict[str, Any]) -> Prepared | None:
    """What an earlier run of the same task has completed; None when its files are gone or of another task."""
    record = _read_json(task.record)
    if record.get("plan") != plan or not all(file.exists() for file in task.results):
        return None
    try:
        made = record["prepared"]
        done = Prepared(Counts.of(made["counts"]), made["vocab_size"], made["tokenizer"])
        same_tokenizer = _digest(task.tokenizer_file) == record["tokenizer"]
    except (KeyError, TypeError, ValueError, OSError):
        return None
    data = open_indexed(task.prefix)
    sizes = (len(data.documents) - 1, len(data.tokens))
    return done if same_tokenizer and sizes == (done.counts.documents, done.counts.tokens) else None


def _is_ours(task: Preparation, plan: dict[str, Any]) -> bool:
    """Whether an earlier run of the same task has left parts; raises ConfigError when they are of another."""
    file = task.parts / "plan.json"
    if not file.exists():
        return False
    changed = [name for name, value in plan.items() if _read_json(file).get(name) != value]
    if changed and not any(task.parts.glob("part-*.json")):  # the first try failed, and the command was corrected
        _discard(task)
        return False
    if changed:
        raise ConfigError(
            f"{task.parts} has the parts of another preparation: {', '.join(changed)} of the input or options changed. "
            "Give the same command to go on, remove the folder, or name another --output_prefix."
        )
    return True


def _discard(task: Preparation) -> None:
    """Removes the parts, and the tokenizer that was trained for them."""
    if _read_json(task.parts / "plan.json").get("train_tokens"):
        task.trained_tokenizer.unlink(missing_ok=True)
    shutil.rmtree(task.parts, ignore_errors=True)


def _train(task: Preparation, pieces: list[Piece]) -> None:
    """Trains the tokenizer, unless an earlier run of the same task has."""
    mark = task.parts / "tokenizer.sha256"
    if not (mark.exists() and os.path.exists(task.tokenizer_file)):
        train_tokenizer(pieces, Path(task.tokenizer_file), num_tokens=task.train_tokens, json_key=task.json_key)
        write_whole(mark, _digest(task.tokenizer_file))
    elif mark.read_text(encoding="utf-8", errors="replace") != _digest(task.tokenizer_file):
        raise ConfigError(
            f"{task.tokenizer_file} is not the file that the interrupted run of this command trained. Remove it and "
            f"{task.parts}, and start again."
        )


def _require_separator(task: Preparation, tokenizer: Tokenizer) -> None:
    if task.append_eod and tokenizer.separator is None:
        raise ConfigError(f"--append_eod: {task.tokenizer} has none of the tokens {', '.join(SEPARATORS)}.")


def _digest(tokenizer: str) -> str:
    if tokenizer == "bytes":
        return tokenizer
    return hashlib.sha256(Path(os.path.expanduser(tokenizer)).read_bytes()).hexdigest()


def _start(task: Preparation, plan: dict[str, Any]) -> None:
    trained = [Path(task.tokenizer_file)] if task.train_tokens else []
    for file in (*task.results, task.record, *trained):
        if file.exists():
            raise ConfigError(
                f"{file} exists and was made from other input or with other options, or other files of "
                f"{task.prefix} are missing or damaged. Name another --output_prefix, or remove the files of this one."
            )
    task.parts.mkdir(exist_ok=True)
    _write_json(task.parts / "plan.json", plan)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except ValueError:
        return {}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    write_whole(file, json.dumps(value, indent=2) + "\n")
