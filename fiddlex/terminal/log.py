"""The log that the binaries show on standard error."""

import functools
import logging
import sys
import textwrap
from collections.abc import Callable
from typing import TextIO

from absl import flags
from absl import logging as absl_logging

from fiddlex.terminal.displays import is_terminal, terminal_width
from fiddlex.terminal.streams import keep_streams


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which the line of progress replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return wrapped(text, terminal_width()) if is_terminal() else text

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width`, but for longer words and lines that begin with a space: commands, tables."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or line.startswith(" "):
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def show_log() -> None:
    """Shows fiddlex's messages as plain lines, and warnings and errors of other libraries (see --verbosity)."""
    keep_streams()
    log = logging.getLogger("fiddlex")
    log.setLevel(logging.INFO)
    log.addHandler(_StderrHandler())
    log.propagate = False
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)
    # Drops what orbax and tensorstore log after a failed write; the failure itself is raised and reported once.
    absl_logging.get_absl_logger().addFilter(lambda record: not record.exc_info)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = functools.partial(_print_unraisable, sys.__unraisablehook__)


def _print_unraisable(
    print_as_python: Callable[["sys.UnraisableHookArgs"], object], unraisable: "sys.UnraisableHookArgs"
) -> None:
    """Prints as Python does, except what tensorstore raises for each write that ends after a failed write."""
    if str(unraisable.exc_value) != "Event loop is closed":  # no names of this module: it may be gone already
        print_as_python(unraisable)
