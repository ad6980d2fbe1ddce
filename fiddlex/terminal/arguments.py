"""The arguments of a command line, in the order in which config_flags requires them."""

import itertools
import re

from absl import flags

_CONFIG_FILE = re.compile(r"--?config(=|$)")
OVERRIDE = re.compile(r"-{0,2}(?:no)?config\.([^=]*)")  # --config.section.field=value, and its path


def file_first(argv: list[str]) -> list[str]:
    """`argv` with its flag files expanded, and the last `--config` before all overrides, as config_flags requires.

    `--`, and what follows it, is another program's and is left out. A flag file that cannot be read raises flags.Error.
    """
    try:
        program, *arguments = flags.FLAGS.read_flags_from_files(split_program(argv)[0])
    except ValueError as error:
        raise flags.Error(
            f"a --flagfile cannot be read: {error}. Write it in UTF-8, without NUL characters."
        ) from error
    for argument in arguments:
        if "\0" in argument:
            raise flags.Error(f"{argument!r} contains a NUL character, which no command line can have. Remove it.")
    file: list[str] = []
    others = []
    remaining = iter(arguments)
    for argument in remaining:
        if _CONFIG_FILE.match(argument):
            file = [argument] if "=" in argument else [argument, *itertools.islice(remaining, 1)]
        else:
            others.append(argument)
    return [program, *file, *others]


def split_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """The parts of `argv` before and after its first `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]
