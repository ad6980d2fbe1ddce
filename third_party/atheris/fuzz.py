"""Feeds a reader of fiddlex with damaged and hostile files, guided by the code that each file reaches (atheris).

    pip install atheris
    python third_party/atheris/fuzz.py --reader=megatron_idx --seconds=300
    python third_party/atheris/fuzz.py --list

The readers are those of `tests/fuzz`. A file that gives a wrong value, an error other than a FiddlexError, much memory
or much time ends the run with another status than 0 and is kept in --artifacts; `--reader=NAME FILE` reads it again.
The last lines say how many files were read.
"""

import argparse
import contextlib
import logging
import pathlib
import random
import sys
import tempfile

try:
    import atheris
except ImportError:
    atheris = None

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # for tests.fuzz
with atheris.instrument_imports(include=["fiddlex"]) if atheris else contextlib.nullcontext():
    from fiddlex.errors import FiddlexError
    from tests.fuzz.mutants import mutated
    from tests.fuzz.readers import READERS

MOST_MIB, MOST_S, MOST_BYTES = 3000, 30, 200_000  # of the process; for a file; of a file


def main() -> None:
    """Reads the command line and fuzzes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--artifacts", default="/tmp", help="folder for files that fail")
    parser.add_argument("--list", action="store_true", help="print the names of the readers")
    parser.add_argument("file", nargs="?", help="a file that failed, to read again")
    options = parser.parse_args()
    if options.list or not options.reader:
        print("\n".join(READERS))
        return
    if atheris is None:
        parser.error("atheris is not installed. Install it in an environment of its own: pip install atheris")
    logging.disable(logging.CRITICAL)
    reader = READERS[options.reader]

    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FiddlexError):
            reader.read(pathlib.Path(folder), data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """Half of the files come from libFuzzer's mutations, half from those that know the format."""
        choices = random.Random(seed)
        if choices.randrange(2):
            return atheris.Mutate(data, most)
        return mutated(choices, data, is_json=reader.is_json)[:most]

    with tempfile.TemporaryDirectory() as corpus:
        for number, whole in enumerate(reader.seeds()):
            (pathlib.Path(corpus) / f"seed-{number}").write_bytes(whole)
        limits = [
            f"-rss_limit_mb={MOST_MIB}",
            f"-timeout={MOST_S}",
            f"-max_total_time={options.seconds}",
            "-max_len=200000",
        ]
        others = [
            f"-seed={options.seed}",
            f"-artifact_prefix={options.artifacts}/{reader.name}-",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *limits, *others, options.file or corpus], read, custom_mutator=mutate)
        atheris.Fuzz()


main()
