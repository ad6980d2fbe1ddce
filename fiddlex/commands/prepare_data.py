"""Makes a dataset of tokens, PREFIX.bin and PREFIX.idx in Megatron-LM's format, from files of text.

    fiddlex prepare_data --input=/data/articles.jsonl --output_prefix=/data/articles \
        --tokenizer=tokenizer.json --append_eod
    fiddlex prepare_data --input=/data/books --output_prefix=/data/books --train_tokenizer=32000

The input is text files or folders of them (each file is a document), JSON Lines, or Parquet (extra parquet). After an
interruption, kill -9 included, the same command goes on where it was. docs/data.md has the details.
"""

import logging
import os
import pathlib
import shlex
import time

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fiddlex.config.readable import readable_size, readable_time
from fiddlex.errors import ConfigError

_INPUT = flags.DEFINE_list("input", None, "files, folders or patterns, separated by commas", required=True)
_PREFIX = flags.DEFINE_string("output_prefix", None, "path of the files to make, without .bin and .idx", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "bytes, or path of a JSON file of the tokenizers library")
_TRAIN = flags.DEFINE_integer("train_tokenizer", 0, "tokens of a byte-level BPE to train on the input; 0: train none")
_KEY = flags.DEFINE_string("json_key", "text", "key of JSON objects, or column of Parquet files, that holds the text")
_APPEND = flags.DEFINE_bool("append_eod", False, "ends each document with the tokenizer's separator")
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count() or 1, "processes that encode")

logger = logging.getLogger("fiddlex.prepare_data")
_LINES_EVERY_S = 10.0


class _Shown:
    """Shows progress: a bar on a terminal, a line every ten seconds elsewhere. A context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console)
        self._task = self._bar.add_task("reading the input", total=None)
        self._is_terminal, self._start_s, self._line_s, self._before = console.is_terminal, 0.0, 0.0, 0

    def __enter__(self) -> "_Shown":
        if self._is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_terminal:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:

        now = time.monotonic()
        if not self._start_s:
            self._start_s = self._line_s = now
            self._before = done  # by earlier runs
        seconds, fresh = now - self._start_s, done - self._before
        text = f"{readable_size(done)} of {readable_size(total)}"
        if fresh:
            left = seconds / fresh * (total - done)
            text += f"  {readable_size(fresh / max(seconds, 1e-9))}/s" + (
                f"  {readable_time(left)} left" if left else ""
            )
        self._bar.update(self._task, description=text, completed=done, total=total)
        if not self._is_terminal and now - self._line_s >= _LINES_EVERY_S:
            self._line_s = now
            logger.info("%s", text)


def main(argv: list[str]) -> None:
    """Prepares the files, and says where they are and which fields of a config to set."""
    from fiddlex.data.preparation.prepare import Preparation, prepare

    if not _INPUT.value:
        raise ConfigError("--input is empty. Name files, folders or patterns, separated by commas.")
    if not _PREFIX.value or _PREFIX.value.endswith("/"):
        raise ConfigError(f"--output_prefix={_PREFIX.value} must end in a name, to which .bin and .idx are added.")
    task = Preparation(
        _INPUT.value,
        pathlib.Path(os.path.abspath(os.path.expanduser(_PREFIX.value))),
        tokenizer=_TOKENIZER.value,
        train_tokens=_TRAIN.value,
        json_key=_KEY.value,
        append_eod=_APPEND.value,
    )
    start = time.monotonic()
    with _Shown() as shown:
        made = prepare(task, workers=_WORKERS.value, progress=shown)
    counts, seconds = made.counts, time.monotonic() - start
    tokenizer = made.tokenizer if made.tokenizer == "bytes" else os.path.abspath(os.path.expanduser(made.tokenizer))
    fields = [
        f"--config.data.source=megatron:{task.prefix}",
        f"--config.data.tokenizer={tokenizer}",
        f"--config.model.vocab_size={made.vocab_size}",
    ]
    left_out = [
        f"{number:,} {what}"
        for number, what in ((counts.empty, "empty texts"), (counts.passed_over, "binary files or files not in UTF-8"))
        if number
    ]
    print(
        f"{task.prefix}.bin and .idx: {counts.documents:,} documents, {counts.tokens:,} tokens of {made.vocab_size:,}, "
        f"from {readable_size(counts.text_bytes)} of text in {readable_time(seconds)}"
        + (f" ({', '.join(left_out)} left out)" if left_out else "")
        + f". Train with {shlex.join(fields)}"
    )
