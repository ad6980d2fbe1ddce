"""How a workdir finds what its run had registered: a family of models, a schedule (`registered.json`).

The workdir names the config file that registered it, or a module of an installed package. Invariant: code that a
workdir names is run only if it is that of a config file which this user has trained with before, at the same path and
with the same contents, or of an installed package that extends fiddlex; somebody else may have written the workdir. A
folder of the user's own (`cache_folder`) tells which config files these are.
"""

import functools
import importlib
import importlib.metadata
import json
import logging
import operator
import re
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import fiddlex.schedules.generators  # noqa: F401  # so that its registry is there
from fiddlex.config import Config
from fiddlex.config.files import load_config
from fiddlex.config.user_code.python_files import errors_of
from fiddlex.config.user_code.registries import REGISTRIES, Origin, config_path, digest_of, keeping_entries
from fiddlex.errors import ConfigError, FiddlexError
from fiddlex.files.places import cache_folder
from fiddlex.files.small_files import read_object, read_small
from fiddlex.files.whole_files import write_whole

logger = logging.getLogger(__name__)

RECORD = "registered.json"
TRAINED = "config_files"  # subdirectory of the user's caches: an empty file for each digest of `Origin`
_KEPT = "pipeline.schedule"  # the field of which a workdir has a table too (`kept_schedule.py`)


class Found(NamedTuple):
    """An entry that a workdir has registered in this process."""

    workdir: Path
    origin: Origin | None


_found: dict[tuple[str, str], Found] = {}  # by field and name


def keep(config: Config, workdir: Path) -> None:
    """Writes the workdir's record of what `config` names that is not fiddlex's own; warns of what is not found again.

    Raises:
      OSError: when the record cannot be written.
    """
    record = {}
    for field, registry in REGISTRIES.items():
        name = operator.attrgetter(field)(config)
        if name not in registry.origins:
            continue
        origin, problem = _recorded(registry.origins[name]), ""
        if origin == Origin():
            problem = "is registered neither by a config file nor by a module of an installed package"
        elif origin.config:
            problem = _note(origin)
        if not problem:
            record[field] = {"name": name, **origin._asdict()}
        elif field != _KEPT:
            logger.warning(
                "%s=%s %s. Programs that read %s will not find it by themselves. %s",
                *(field, name, problem, workdir, _remedy("FILE.py")),
            )
    if record:
        write_whole(workdir / RECORD, json.dumps(record, indent=2) + "\n")
    else:
        (workdir / RECORD).unlink(missing_ok=True)


def find(config: Config, workdir: Path) -> None:
    """Registers what `config` names and this process does not know, as the record of its workdir says.

    Raises:
      ConfigError: when the record cannot be followed, or another workdir has registered the name otherwise. Of a
        schedule, that is logged, since the workdir has its table.
    """
    try:
        record = read_object(workdir / RECORD)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s. What the run had registered is not found.", workdir / RECORD, error)
        return
    for field, registry in REGISTRIES.items():
        name, entry = operator.attrgetter(field)(config), record.get(field)
        if name in registry.built_in or not isinstance(entry, dict) or entry.pop("name", None) != name:
            continue
        try:
            origin = _origin(entry)
            if name in registry:
                _compare(field, name, origin, workdir)
                continue
            with keeping_entries():
                _register(origin)
            if name not in registry:
                raise ConfigError(f"{_where(origin)} does not register it now. {_remedy('FILE.py')}")
            _found[field, name] = Found(workdir, registry.origins.get(name))
        except FiddlexError as error:
            problem = f"{field}={name!r} of the run in {workdir}: {error}"
            if field != _KEPT:
                raise ConfigError(problem) from error
            logger.warning("%s Until then the table of the workdir takes its place.", problem)


def _register(origin: Origin) -> None:
    """Runs what registers an entry; ConfigError when that must not be run, or fails."""
    where, place = _where(origin), config_path(origin.config)
    if origin.module:
        if not _extends(origin.module):
            raise ConfigError(
                f"{where} has registered it, and no package is installed here that has this module and uses fiddlex. "
                f"Install it, or {_remedy('FILE.py', first='name')}"
            )
        with errors_of(where):
            importlib.import_module(origin.module)
        return
    if not re.fullmatch("[0-9a-f]{64}", origin.digest) or origin.files[:1] != (place,):
        raise ConfigError(f"{RECORD} does not tell what has registered it. {_remedy('FILE.py')}")
    if not _is_noted(origin):
        raise ConfigError(
            f"{where} has registered it. You have trained with no such file here, and nothing else that a workdir "
            f"names is run. If you trust that file: {_remedy(origin.config, first='name')}"
        )
    try:
        digest = digest_of(origin.config, origin.files)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where} has registered it, and cannot be read ({error}). {_remedy('NEW_PATH.py')}"
        ) from error
    if digest != origin.digest:
        raise ConfigError(
            f"{where} has registered it, and {' or '.join(origin.files)} has changed since. Put the former contents "
            f"back, or if the model is still the same, {_remedy(origin.config, first='name')}"
        )
    load_config(origin.config)


def _compare(field: str, name: str, origin: Origin, workdir: Path) -> None:
    """Tells that a name is registered here by something else than in a run; ConfigError if a workdir has done it."""
    here = REGISTRIES[field].origins.get(name, Origin())
    if origin == _recorded(here):
        return
    if (found := _found.get((field, name))) and found.origin == here:
        raise ConfigError(
            f"{_where(origin)} has registered it, and this process has another of that name, which the run in "
            f"{found.workdir} had from {_where(here)}. Read the two in processes of their own."
        )
    told = f"has changed since the run in {workdir} was last started"
    if _where(here) != _where(origin):
        told = f"has registered it here, and {_where(origin)} for the run in {workdir}"
    _tell_once(f"{field}={name!r}: {_where(here)} {told}.")


@functools.cache
def _tell_once(text: str) -> None:
    logger.info("%s", text)


def _where(origin: Origin) -> str:
    return (origin.module and f"the module {origin.module}") or origin.config or "a program by itself"


def _remedy(path: str, first: str = "Name") -> str:
    return (
        f"{first} the file that registers it, with --config={path} or, in a config file or a program, with "
        f"fiddlex.config.files.load_config({path!r})."
    )


def _recorded(origin: Origin) -> Origin:
    """What is recorded of an origin: an importable module alone, which other machines have too, or a config file."""
    if origin.module and _extends(origin.module):
        return Origin(origin.module)
    return origin._replace(module="")


def _origin(entry: dict[str, Any]) -> Origin:
    """The origin that a record tells; nothing where it has other fields, or values of other types."""
    module, config, files, digest = (entry.get(name) for name in Origin._fields)
    if isinstance(files, list) and all(isinstance(each, str) for each in (module, config, *files, digest)):
        return Origin(str(module), str(config), tuple(files), str(digest))
    return Origin()


@functools.cache
def _extends(module: str) -> bool:
    """Whether a module is of an installed package and its source names fiddlex; it is not imported."""
    top, *inner = module.split(".")
    if top not in importlib.metadata.packages_distributions():  # not of the folder where a program is started
        return False
    try:
        spec = find_spec(top)
        for name in inner:
            spec = spec and PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
        return bool(spec and spec.origin and "fiddlex" in read_small(spec.origin))
    except (OSError, ValueError):
        return False


def _note(origin: Origin) -> str:
    """Notes that the user trains with a config file; returns why that was not possible, or nothing."""
    try:
        path = _noted(origin)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return f"comes from {origin.config}, which cannot be noted as a file of yours ({error})"
    return ""


def _is_noted(origin: Origin) -> bool:
    try:
        return _noted(origin).exists()
    except OSError:  # a user without a home
        return False


def _noted(origin: Origin) -> Path:
    return cache_folder() / TRAINED / origin.digest
