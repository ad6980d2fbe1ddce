"""Functions in a user's Python file, named as `PATH.py:FUNCTION`: schedules, semantics and update rules.

The file is run as a config file is, with the user's rights, once for each state of the file. Only texts of the user's
own command line or config lead here: what a workdir's own `config.json` names is never run
(`fiddlex.train.run.workdir`, `fiddlex.train.run.transfer.result`).
"""

import contextlib
import functools
import inspect
import os
import stat
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, cast

from fiddlex.config.rules import nearest
from fiddlex.config.user_code.python_files import errors_of, run_file, similar_file
from fiddlex.errors import FiddlexError


class Own(NamedTuple):
    """What a user's functions of one kind are for."""

    what: str  # what such a function gives; messages begin with it
    signature: str  # the arguments that it must take, as they stand behind its name
    error: type[FiddlexError]  # the type of the errors

    def load(self, path: str, function: str) -> Callable[..., Any]:
        """The function of this name in a Python file, which is run again only once it has changed; raises `error`."""
        name = f"{path}:{function}" if function else path
        try:
            state = os.stat(path)
        except OSError as error:
            raise self.error(
                f"{self.what} {name}: {os.path.abspath(path)} cannot be read ({error.strerror}).{similar_file(path)} "
                "Give the path of a Python file and the name of a function in it, as in my/file.py:mine."
            ) from error
        if not stat.S_ISREG(state.st_mode):  # a folder, which Python would run too, or a pipe, for which it would wait
            raise self.error(f"{self.what} {name}: {os.path.abspath(path)} is not a file.")
        with self.naming(name):
            with errors_of(path, self.error):
                contents = _contents(path, os.path.abspath(path), state.st_mtime_ns, state.st_size)
            return self._named(contents, path, function)

    def _named(self, contents: dict[str, Any], path: str, function: str) -> Callable[..., Any]:
        names = [name for name, value in contents.items() if inspect.isfunction(value) and name[0] != "_"]
        own = [name for name in names if contents[name].__code__.co_filename == path]  # not what the file imports
        if not function:
            raise self.error(f"name a function of the file too, as in {path}:{(own or ['mine'])[0]}.")
        found = contents.get(function)
        if callable(found) and isinstance(found, Hashable):
            return cast(Callable[..., Any], found)
        has = nearest(function, own) if own else f"Write one that begins with def {function}{self.signature}."
        raise self.error(f"{path} has no function {function!r}. {has}")

    def call(self, function: Callable[..., Any], path: str, arguments: dict[str, Any]) -> Any:
        """What a function of a file returns for these keyword arguments; an `error` names the line where it fails."""
        name = getattr(function, "__name__", repr(function))
        with errors_of(path, self.error):  # some callables, as those written in C, have no signature
            signature = inspect.signature(function)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise self.error(
                f"{path} has {name}{signature}, which cannot be called with {', '.join(arguments)} ({error}). It must "
                f"take the keyword arguments of def {name}{self.signature}."
            ) from error
        with errors_of(path, self.error):
            return function(**arguments)

    @contextlib.contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Puts `what`, and the name of a function, before the message of an error of this type that the body raises."""
        try:
            yield
        except self.error as error:
            raise self.error(f"{self.what} {name}: {error}") from error


@functools.lru_cache(maxsize=16)
def _contents(path: str, *state: object) -> dict[str, Any]:
    """What the module of a file in some state holds."""
    return run_file(path)
