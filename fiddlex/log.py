"""What the binaries show of the log, on standard error."""

import logging
import sys
from typing import TextIO

from absl import flags
from absl import logging as absl_logging


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the moment: a progress bar stands in for it while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show_log() -> None:
    """Shows fiddlex's own messages as plain lines, and of other libraries warnings and errors (or by --verbosity)."""
    log = logging.getLogger("fiddlex")
    log.setLevel(logging.INFO)
    log.addHandler(_StderrHandler())
    log.propagate = False
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)
    # What orbax and tensorstore leave behind when a read or write fails; the failure itself is raised and told once.
    absl_logging.get_absl_logger().addFilter(lambda record: not record.exc_info)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _print_unraisable


def _print_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """As Python does, but for what tensorstore prints of every read or write that ends after the one that failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
