"""Freed memory that a process keeps."""

import ctypes
import subprocess
import sys

import pytest

from fiddlex.cluster.malloc_pages import keep_freed_memory

# Allocates, fills and frees 64 MB ten times, and prints how many of the last times mapped pages anew.
PROGRAM = """
import ctypes, resource, sys
from fiddlex.cluster.malloc_pages import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc, size, faults = ctypes.CDLL(None), 64_000_000, []
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(block, 1, size)
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(each > 10 for each in faults[1:]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
@pytest.mark.parametrize(("way", "mapped"), [("keep", 0), ("give back", 9)])
def test_pages_are_mapped_once(way: str, mapped: int) -> None:
    command = [sys.executable, "-c", PROGRAM, way]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == mapped


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
