"""Ctrl-C ends a program within a second, whatever its main thread does.

Python runs the handler of a signal in the main thread, between two instructions. While XLA compiles a large program
that may be minutes later. So a thread of this module learns of every signal at once (`signal.set_wakeup_fd`). It gives
the program `GRACE_S` to end by itself, and then ends the process, if the program has nothing to lose. An interrupted
program also leaves out the end of the interpreter, which waits for XLA's threads, and sometimes crashes in them.
Leaving so is safe: what fiddlex has on disk is whole at every moment, as after kill -9.
"""

import collections
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from fiddlex.terminal import library_log, progress

GRACE_S = 0.5
_AGAIN_S = 0.01
_IMPORT = "<frozen importlib._bootstrap>"  # the file of the frames that import a module

# A terminal sends SIGHUP when it closes. Many sites have Slurm send SIGUSR1 or SIGUSR2 before it ends a job.
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP, *ENDING)  # that ask a run to save and end

MayLeave = Callable[[signal.Signals, int], bool]


def _always(number: signal.Signals, times: int) -> bool:
    return True


_may_leave: MayLeave = _always
_is_watching = threading.Event()  # in a command, and not where fiddlex is a library
_sent_again: collections.deque[int] = collections.deque()  # signals that `postponed` sends, which nobody else has sent
_is_told = threading.Event()  # once somebody tells the user of the signal
_is_interrupted = threading.Event()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those of `STOP_SIGNALS` that this process was not started to ignore, as `nohup` starts it to ignore SIGHUP."""
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN)


def watch() -> None:
    """Begins to watch; to be called once, in the main thread, after handlers of signals are set."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    _is_watching.set()
    threading.Thread(target=_wait, args=(readable,), name="fiddlex-interrupts", daemon=True).start()


def may_leave_if(may_leave: MayLeave) -> MayLeave:
    """Says when a signal ends the process, if the program has not ended `GRACE_S` later; returns what was said before.

    `may_leave` takes the signal, and how many there were with it; it is called in another thread. At first each signal
    ends the process.
    """
    global _may_leave
    before, _may_leave = _may_leave, may_leave
    return before


def postponed(number: int) -> bool:
    """For handlers that raise: whether they must not now, since Python would ignore it; the signal then comes again.

    Python ignores what is raised in callbacks of the garbage collector; jax has one, which runs often.
    """
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    if not any(frame.f_code in callbacks for frame in _frames()):
        return False
    if _is_watching.is_set():
        _sent_again.append(number)
    threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()
    return True


def tell() -> None:
    """Notes that the user is told of the signal, by a handler or by whoever catches what it raises."""
    _is_told.set()


def interrupt(error: type[BaseException], *arguments: object) -> NoReturn:
    """Raises an error in a handler, to end the program; a command that is importing a library ends at once.

    Libraries that are being imported turn the error into others, and print it. A notebook or another program, which
    uses fiddlex as a library, may have more to lose than a command, so it always gets the error.
    """
    _is_interrupted.set()
    if _is_watching.is_set() and any(frame.f_code.co_filename == _IMPORT for frame in _frames()):
        _leave(signal.SIGINT if error is KeyboardInterrupt else signal.Signals(int(str(arguments[0]))))
    tell()
    raise error(*arguments)


def is_interrupted() -> bool:
    """Whether `interrupt` was called; a library may have turned its error into another one."""
    return _is_interrupted.is_set()


def leave_if_interrupted(status: object) -> None:
    """Ends the process with this status, without the end of the interpreter, if a signal has ended the program."""
    if _is_interrupted.is_set() and isinstance(status, int):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _wait(readable: int) -> None:
    times = 0
    while received := os.read(readable, 1):
        try:
            _sent_again.remove(received[0])
        except ValueError:
            times += 1
        else:
            continue  # its timer was started when it first came
        timer = threading.Timer(GRACE_S, _leave_late, (signal.Signals(received[0]), times))
        timer.daemon = True  # a program that has ended does not wait for it
        timer.start()


def _leave_late(number: signal.Signals, times: int) -> None:
    if _may_leave(number, times):
        _leave(number)


def _leave(number: signal.Signals) -> NoReturn:
    """Ends the process as if the signal had killed it."""
    progress.leave_terminal()
    with contextlib.suppress(OSError):  # the terminal may have been closed
        if not _is_told.is_set():
            how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
            os.write(sys.stderr.fileno(), f"{os.path.basename(sys.argv[0])}: {how}.\n".encode())
        library_log.end(failed=False)
    os._exit(128 + number)
