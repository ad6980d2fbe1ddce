"""Measures the preparation of a dataset beside the way of Megatron-LM's tools/preprocess_data.py, on the same text.

    pip install megatron-core torch
    python third_party/megatron/preprocess_speed.py [--megabytes=50] [--repeats=3] [--workers=2]

That tool is not in the package megatron-core. This driver does what it does: processes of a multiprocessing.Pool take
lines of JSON Lines, 32 at a time, decode them and encode the text, and the main process writes the ids that they send
back with IndexedDatasetBuilder. It calls the tokenizers library directly, where the tool calls it by way of
transformers. The text is the sources of Python's standard library, again and again; the tokenizer is a byte-level BPE
of 32,000 tokens that is trained on them first. Both make a dataset in turn; the driver checks that the files are the
same and prints each time and the medians.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

warnings.filterwarnings("ignore")

ROOT = pathlib.Path(__file__).parents[2]
CHUNK = 32  # lines that a process takes at once
_tokenizer = None


def write_lines(file: pathlib.Path, num_bytes: float) -> None:
    """Writes JSON Lines of the standard library's sources."""
    from fiddlex.data.documents import read_stdlib

    lines = [json.dumps({"text": document.text}) + "\n" for document in read_stdlib()]
    written = 0
    with file.open("w", encoding="utf-8") as stream:
        while written < num_bytes:
            for line in lines:
                written += stream.write(line)


def start(file: str) -> None:
    """Loads the tokenizer of a process."""
    import tokenizers

    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = tokenizers.Tokenizer.from_file(file)


def encode(line: str) -> tuple[list[int], int]:
    """The ids of a line's text with the end of text, and the line's length."""
    assert _tokenizer is not None
    end = _tokenizer.token_to_id("<|endoftext|>")
    assert end is not None
    ids = _tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return [*ids, end], len(line)


def preprocess(lines: pathlib.Path, prefix: pathlib.Path, tokenizer: pathlib.Path, workers: int) -> None:
    """What the tool does."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    with lines.open(encoding="utf-8") as stream, multiprocessing.Pool(workers, start, (str(tokenizer),)) as pool:
        for ids, _ in pool.imap(encode, stream, CHUNK):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def main() -> None:
    """Prints the seconds and MB/s of each run, and the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--preprocess", nargs=3, metavar=("LINES", "PREFIX", "TOKENIZER"))
    arguments = parser.parse_args()
    if arguments.preprocess:  # in a process of its own, as the other
        lines, prefix, tokenizer = map(pathlib.Path, arguments.preprocess)
        preprocess(lines, prefix, tokenizer, arguments.workers)
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent)
        lines, sample, tokenizer = folder / "lines.jsonl", folder / "sample.jsonl", folder / "sample-tokenizer.json"
        write_lines(lines, arguments.megabytes * 1e6)
        write_lines(sample, 1)
        ours = [sys.executable, str(ROOT / "experiments/prepare_data.py"), f"--workers={arguments.workers}"]
        train = [*ours, f"--input={sample}", f"--output_prefix={folder / 'sample'}", "--train_tokenizer=32000"]
        subprocess.run(train, check=True, capture_output=True)
        rates: dict[str, list[float]] = {"fiddlex": [], "megatron": []}
        for repeat in range(arguments.repeats):
            prefixes = {name: folder / f"{name}-{repeat}" for name in rates}
            commands = {
                "fiddlex": [
                    *(*ours, f"--input={lines}", f"--output_prefix={prefixes['fiddlex']}"),
                    *(f"--tokenizer={tokenizer}", "--append_eod"),
                ],
                "megatron": [
                    *(sys.executable, __file__, f"--workers={arguments.workers}"),
                    *("--preprocess", str(lines), str(prefixes["megatron"]), str(tokenizer)),
                ],
            }
            for name, command in commands.items():
                begin, before = time.monotonic(), os.times()
                subprocess.run(command, check=True, capture_output=True)
                seconds, after = time.monotonic() - begin, os.times()
                cpu = after.children_user + after.children_system - before.children_user - before.children_system
                rates[name].append(lines.stat().st_size / 1e6 / seconds)
                print(f"{name}: {seconds:.1f} s, {rates[name][-1]:.2f} MB/s, {cpu:.1f} s of CPU", flush=True)
            for end in (".bin", ".idx"):
                contents = {each.with_name(each.name + end).read_bytes() for each in prefixes.values()}
                assert len(contents) == 1, f"the {end} files differ"
        print("medians: " + ", ".join(f"{name} {statistics.median(values):.2f} MB/s" for name, values in rates.items()))


if __name__ == "__main__":
    main()
