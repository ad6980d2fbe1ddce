"""Makes the C library keep the memory that a step on CPUs frees, for the next step.

XLA's CPU backend allocates the temporaries of a step, such as the stash, at each call. glibc returns memory of this
size to the operating system when it is freed, and the system maps it again, page by page and filled with zeros, in the
next step (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD).
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the parameters' numbers in glibc's malloc.h
_MOST = 2**31 - 1  # bytes; mallopt takes an int


def keep_freed_memory() -> bool:
    """Makes this process keep freed memory, up to 2 GiB at the end of the heap; returns whether the C library can."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # there is no mallopt, as on macOS
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _MOST))
