"""The exceptions that fiddlex raises for mistakes a person can fix; binaries print their text without a traceback."""

import shlex
import sys


def installation(extra: str) -> str:
    """The command that installs an extra of fiddlex into the environment of this process, for a message."""
    return f"{shlex.quote(sys.executable)} -m pip install 'fiddlex[{extra}]'"


class FiddlexError(Exception):
    """Base of every error whose message is meant for the person who runs the program."""


class ConfigError(FiddlexError, ValueError):
    """A config field that is unknown, of the wrong type, out of range, or contradicts another field."""


class DataError(FiddlexError, ValueError):
    """Data that is missing, empty, truncated, of another dtype than declared, or outside the vocabulary."""


class CheckpointError(FiddlexError, RuntimeError):
    """A workdir or checkpoint that cannot be read, written or resumed with this config."""


class DeviceError(FiddlexError, RuntimeError):
    """A mesh that does not fit the devices of this process."""


class FaultError(FiddlexError):
    """A training step went wrong, and the run cannot go on from it."""


class SpikeError(FaultError):
    """The loss or the gradient of a step is far above what is usual in the run (`train.spike_bound`)."""


class NonFiniteError(FaultError, FloatingPointError):
    """A loss, gradient or weight that is not finite; training cannot continue.

    Attributes:
      before_update: whether the loss or gradient was not finite even before the update, so that the fault lies in the
        weights that the step began with.
    """

    def __init__(self, message: str, *, before_update: bool = True):
        super().__init__(message)
        self.before_update = before_update


class ScheduleError(FiddlexError, ValueError):
    """A pipeline schedule that is unknown, impossible for these sizes, unreadable, or breaks a rule."""


class Stopped(SystemExit):
    """A signal has ended the program, with status 128 + `signal`; no code of a user's file may take it for its own."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.signal = number


def is_failure(error: BaseException) -> bool:
    """Whether an exception of another library is a failure, and no request to end the program.

    A panic of a library in Rust, such as tokenizers, reaches Python as a BaseException that is no Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
