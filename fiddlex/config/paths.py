"""The paths in a config, made absolute: a workdir keeps them so, and two ways to write one path are one value."""

import operator
import re

from fiddlex.config.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.config.values.every import AUTO
from fiddlex.config.values.schedule_source import Kind, source_of
from fiddlex.config.values.source import is_megatron, parse_source
from fiddlex.files.places import absolute

_FOLDERS = ("data.cache", "data.sample_cache_folder", "data.share")
_OWN_FILES = ("pipeline.schedule", "pipeline.semantics", "optimizer.name", "optimizer.schedule")


def absolute_paths(config: Config) -> Config:
    """A copy of a validated config in which the paths of data, tokenizer, folders, weights and topology are absolute.

    A schedule's file is not among them, since a workdir has its table; nor are a user's functions or compiled programs.
    """
    return replaced(config, _absolute_paths(config))


def made_absolute(config: Config) -> dict[str, str]:
    """The fields of a valid config whose relative paths a run in another folder would not find, with absolute ones.

    Files of schedules, semantics and update rules are among them, and the folder of compiled programs.
    """
    train, pipeline = config.train, config.pipeline
    paths = _absolute_paths(config) | {
        **{name: _own_file(operator.attrgetter(name)(config)) for name in _OWN_FILES},
        "pipeline.semantics_schedule": ",".join(map(_phase, pipeline.semantics_schedule.split(","))),
        "train.compilation_cache": AUTO if train.compilation_cache == AUTO else _absolute(train.compilation_cache),
    }
    return {name: path for name, path in paths.items() if path != operator.attrgetter(name)(config)}


def _absolute_paths(config: Config) -> dict[str, str]:
    data, train = config.data, config.train
    paths = {
        "data.source": _source(data.source),
        "data.eval_source": _source(data.eval_source),
        "data.tokenizer": data.tokenizer if data.tokenizer == "bytes" else _absolute(data.tokenizer),
        "train.init_from": (_source if train.init_from.startswith("hf:") else _absolute)(train.init_from),
        "train.topology": _absolute(train.topology) if train.topology.endswith(".toml") else train.topology,
    }
    for name in _FOLDERS:
        paths[name] = _absolute(getattr(data, name.removeprefix("data.")))
    return paths


def _own_file(text: str) -> str:
    source = source_of(text)
    if source.kind is Kind.TABLE:
        return f"file:{_absolute(source.path)}"
    return f"{_absolute(source.path)}:{source.function}" if source.is_own else text


def _phase(text: str) -> str:
    """A phase of `pipeline.semantics_schedule`, which may be `PATH.py:FUNCTION` and a length."""
    own = re.fullmatch(r"(.+\.py:\w+?)((?::[\d.]+)?)", text.strip())
    return f"{_own_file(own[1])}{own[2]}" if own else text


def _source(source: str) -> str:
    """`KIND:PATH` with an absolute path; `stdlib` and nothing at all as they are."""
    kind, colon, path = source.partition(":")
    if is_megatron(source):
        parts = parse_source("data.source", source)
        if len(parts) > 1:  # the weights stay as they are written
            written = [part.partition(":")[0] for part in path.split(",")]
            path = ",".join(f"{weight}:{_absolute(prefix)}" for weight, (_, prefix) in zip(written, parts, strict=True))
            return f"{kind}:{path}"
        path = parts[0][1]
    return f"{kind}{colon}{_absolute(path)}"


def _absolute(path: str) -> str:
    return str(absolute(path)) if path else ""
