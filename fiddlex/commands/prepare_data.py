"""Makes a dataset of tokens, PREFIX.bin and PREFIX.idx in Megatron-LM's format, from files of text.

    fiddlex prepare_data --input=/data/articles.jsonl --output_prefix=/data/articles \
        --tokenizer=tokenizer.json --append_eod
    fiddlex prepare_data --input=/data/books --output_prefix=/data/books --train_tokenizer=32000

The input is text files or folders of them (each file is a document), JSON Lines, or Parquet (extra parquet). After an
interruption, kill -9 included, the same command goes on where it was. docs/data.md has the details.
"""

import os
import pathlib
import shlex
import time

from absl import flags

from fiddlex.errors import ConfigError
from fiddlex.terminal.command_line import define_path
from fiddlex.terminal.phase import Phase
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import counted, readable_size, readable_time

_INPUT = flags.DEFINE_list("input", None, "files, folders or patterns, separated by commas", required=True)
_PREFIX = define_path("output_prefix", None, "path of the files to make, without .bin and .idx", required=True)
_TOKENIZER = define_path("tokenizer", "bytes", "bytes, or path of a JSON file of the tokenizers library")
_TRAIN = flags.DEFINE_integer("train_tokenizer", 0, "tokens of a byte-level BPE to train on the input; 0: train none")
_KEY = flags.DEFINE_string("json_key", "text", "key of JSON objects, or column of Parquet files, that holds the text")
_APPEND = flags.DEFINE_bool("append_eod", False, "ends each document with the tokenizer's separator")
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count() or 1, "processes that encode")


class _Rate:
    """Shows how much of the input is done, and how fast; an earlier run may have done some of it.

    Args:
      shown: the phase, whose units are bytes.
    """

    def __init__(self, shown: Phase):
        self._shown, self._start_s, self._before = shown, 0.0, 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._start_s:
            self._start_s, self._before = now, done
        rate = (done - self._before) / max(now - self._start_s, 1e-9)
        self._shown.total = total
        self._shown.advance(done, *([f"{readable_size(rate)}/s"] if rate else []))


def main(argv: list[str]) -> None:
    """Prepares the files, and says where they are and which fields of a config to set."""
    from fiddlex.data.preparation.prepare import Preparation, prepare

    if not _INPUT.value:
        raise ConfigError("--input is empty. Name files, folders or patterns, separated by commas.")
    if not _PREFIX.value or _PREFIX.value.endswith("/"):
        raise ConfigError(f"--output_prefix={_PREFIX.value} must end in a name, to which .bin and .idx are added.")
    task = Preparation(
        _INPUT.value,
        pathlib.Path(os.path.abspath(_PREFIX.value)),
        tokenizer=_TOKENIZER.value,
        train_tokens=_TRAIN.value,
        json_key=_KEY.value,
        append_eod=_APPEND.value,
    )
    start = time.monotonic()
    with phase("Preparing", number=readable_size) as preparing:
        made = prepare(task, workers=_WORKERS.value, progress=_Rate(preparing))
    counts, seconds = made.counts, time.monotonic() - start
    tokenizer = made.tokenizer if made.tokenizer == "bytes" else os.path.abspath(made.tokenizer)
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
        f"{task.prefix}.bin and .idx: {counted(counts.documents, 'document')}, {counts.tokens:,} tokens of a "
        f"vocabulary of {made.vocab_size:,}, from {readable_size(counts.text_bytes)} of text in "
        f"{readable_time(seconds)}"
        + (f" ({', '.join(left_out)} left out)" if left_out else "")
        + f". Train with {shlex.join(fields)}"
    )
