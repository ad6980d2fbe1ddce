"""Tables of names that a user's code may extend, and where each entry that it adds comes from.

Another program can add an entry again that a config file adds, or a module when it is imported
(`fiddlex.train.run.registered`); it cannot do so with what a notebook or a program adds by itself.
"""

import contextlib
import hashlib
import os
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from fiddlex.files.small_files import check_regular

T = TypeVar("T")
_RUNNER = "fiddlex.config.files"  # the module that runs config files


class Origin(NamedTuple):
    """What another program must do to add an entry again; nothing is known to help where all is empty."""

    module: str = ""  # the module whose import adds it
    config: str = ""  # the config file that adds it: its path from the root, and a colon and its argument, if any
    files: tuple[str, ...] = ()  # the config file, and the file of the module that it imports
    digest: str = ""  # of `config` and the contents of `files` (`digest_of`)


class Registry(UserDict[str, T]):
    """A table of what the values of a config field may name.

    Attributes:
      field: the path of the field, as `model.family`.
      built_in: the entries that every process has.
      origins: where each entry comes from that has been added to these.
    """

    def __init__(self, field: str, built_in: Mapping[str, T]):
        super().__init__()
        self.field, self.built_in = field, dict(built_in)
        self.origins: dict[str, Origin] = {}
        self.data.update(built_in)
        REGISTRIES[field] = self

    def __setitem__(self, name: str, value: T) -> None:
        super().__setitem__(name, value)
        self.origins[name] = _origin()
        if self.built_in.get(name) is value:
            del self.origins[name]

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.origins.pop(name, None)


REGISTRIES: dict[str, Registry[Any]] = {}  # by their fields, those whose modules are imported
_running: list[str] = []  # the config files that are being run, each inside of the former


@contextlib.contextmanager
def running(config: str) -> Iterator[None]:
    """Entries that the body adds come from a config file, named as in `Origin.config`."""
    _running.append(config)
    try:
        yield
    finally:
        _running.pop()


@contextlib.contextmanager
def keeping_entries() -> Iterator[None]:
    """The body may add entries; those that there are stay as they are."""
    before = [(registry, dict(registry), dict(registry.origins)) for registry in REGISTRIES.values()]
    try:
        yield
    finally:
        for registry, entries, origins in before:
            registry.data.update(entries)
            registry.origins.update(origins)


def added() -> dict[tuple[str, str], Any]:
    """The entries that are not fiddlex's own, by field and name."""
    return {(field, name): each[name] for field, each in REGISTRIES.items() for name in each.origins}


def digest_of(config: str, files: tuple[str, ...]) -> str:
    """A fingerprint of a config file's name and argument, and of the names and contents of files.

    Raises:
      OSError, ValueError: when a file cannot be read, or is a folder, a pipe or a device.
    """
    parts = [config.encode()]
    for path in files:
        check_regular(path)
        with open(path, "rb") as file:
            parts += [path.encode(), hashlib.file_digest(file, "sha256").digest()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _origin() -> Origin:
    """Where the entry comes from that the caller's caller adds."""
    imported = _imported()
    module = imported["__name__"] if imported else ""
    if not _running:
        return Origin(module)
    config, files = _running[-1], [config_path(_running[-1])]
    if imported and os.path.isfile(imported.get("__file__") or ""):
        files.append(os.path.abspath(imported["__file__"]))
    return Origin(module, config, tuple(files), digest_of(config, tuple(files)))


def _imported() -> dict[str, Any] | None:
    """The contents of the module that is being imported, if that is why an entry is added."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") != _RUNNER:
        if frame.f_code.co_name == "<module>":  # of a config file and of a notebook's cell, too
            is_found = frame.f_globals.get("__spec__") is not None and frame.f_globals["__name__"] != "__main__"
            return frame.f_globals if is_found else None
        frame = frame.f_back
    return None


def config_path(config: str) -> str:
    """The path in what names a config file, as in `Origin.config`."""
    return config.partition(":")[0]
