"""Locks on open files, which the operating system releases when their process ends, however it ends."""

import contextlib
import fcntl
from collections.abc import Iterator


def try_lock(descriptor: int) -> bool:
    """Takes the lock of an open file unless another descriptor has it; closing the file releases it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Holds the lock of an open file while the body runs; waits for it if need be."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
