"""Compiled programs are kept on disk, so that a run which starts again need not compile them again.

jax's persistent compilation cache names each program's file by a digest of the program, of the options and of the
versions of jax and XLA. fiddlex chooses the folder and bounds its size. jax does not tell processors apart, and a
program for one CPU may have instructions that another lacks. So machines that share the folder of a user, such as the
hosts of a cluster, each use the sub-folder of their kind of processor.
"""

import contextlib
import hashlib
import logging
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from filelock import FileLock
from jax.experimental.compilation_cache import compilation_cache

from fiddlex.config.values.every import AUTO
from fiddlex.errors import ConfigError
from fiddlex.files.places import absolute, cache_folder

logger = logging.getLogger(__name__)

MOST_BYTES = 10 * 2**30  # of a folder; jax then removes what was not used for longest
_FOLDER = "jax_compilation_cache_dir"  # jax's name for the folder
_LOCK_TIMEOUT_S = 10  # jax's own, for a process that writes a program
_HIT = "/jax/compilation_cache/cache_hits"  # the event that jax records when it has found a program


def keep_programs(where: str) -> None:
    """Lets this process look for compiled programs in a folder, and keep there what it compiles.

    `where` is `train.compilation_cache`: a folder; empty for none; or `auto` for the folder of
    JAX_COMPILATION_CACHE_DIR, else `fiddlex/programs` in the user's folder for caches, if it can be written.
    """
    if where == AUTO and _in_use():
        return
    if not where:
        jax.config.update(_FOLDER, None)
        compilation_cache.reset_cache()
        return
    try:
        folder = (cache_folder() / "programs" if where == AUTO else absolute(where)) / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        if where != AUTO:
            raise ConfigError(
                f"train.compilation_cache={where} cannot be written: {error.strerror or error}. Name another "
                "folder, or none (train.compilation_cache=)."
            ) from error
        logger.info("Compiled programs are not kept: %s.", error)
        return
    if _in_use() != str(folder):
        _remove_incomplete(folder)
        jax.config.update(_FOLDER, str(folder))
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
        compilation_cache.reset_cache()  # it may have been opened elsewhere


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """A context in which XLA compiles every program, also those that are kept; for reports that XLA then writes."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    compilation_cache.reset_cache()  # jax asks only once whether to look for programs
    try:
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


class Hits:
    """The number of programs that one thread has found in the cache since counting began."""

    def __init__(self) -> None:
        self.number = 0
        self._thread = threading.get_ident()

    def note(self, event: str, **details: str | int) -> None:
        """Counts an event of jax's if it is a hit of this thread; jax calls this in the thread that compiles."""
        self.number += event == _HIT and threading.get_ident() == self._thread


@contextlib.contextmanager
def counting_hits() -> Iterator[Hits]:
    hits = Hits()
    jax.monitoring.register_event_listener(hits.note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(hits.note)


def _in_use() -> str | None:
    """The folder in which jax keeps programs; None: in none."""
    folder: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return folder


def _remove_incomplete(folder: Path) -> None:
    """Removes the programs that jax was writing when it was killed, or when the disk was full.

    jax writes a program, and then a file with the time of its last use. While a program lacks that file, jax fails
    to keep any other. After a power cut both files may be there, and empty; jax keeps no other program in their place.
    """
    lock = FileLock(folder / ".lockfile", timeout=_LOCK_TIMEOUT_S)  # jax's
    with contextlib.suppress(OSError, NotImplementedError), lock:  # without the lock nothing is removed
        for program in folder.glob("*-cache"):
            used = program.with_name(f"{program.name.removesuffix('cache')}atime")
            if not used.exists() or not program.stat().st_size:
                program.unlink()


def _processor() -> str:
    """A name for the kind of this machine's processor: its architecture, and a digest of what it can do."""
    features = platform.processor()
    with contextlib.suppress(OSError):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), features)
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
