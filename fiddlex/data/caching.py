"""Which samples a run keeps and where, and the names of the data that its samples and batches are made of."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fiddlex
from fiddlex.config import Config
from fiddlex.config.fields import NOT_EXAMPLES, NOT_SAMPLES, paths
from fiddlex.config.values.source import is_megatron, parse_source
from fiddlex.data.counts import DataCounts
from fiddlex.data.documents import file_states
from fiddlex.data.examples import ExampleSource
from fiddlex.data.sample_cache import Cache, CachedStore, MemoryCache
from fiddlex.data.staged_examples import StagedExamples
from fiddlex.data.tokenizers import tokenizer_digest
from fiddlex.files.places import absolute

_GIB = 2**30


def keep_samples(config: Config, sources: Sequence[ExampleSource], *, fingerprint: str, counts: DataCounts) -> None:
    """Lets the sources fetch from the cache that the config asks for, if it asks for one."""
    data = config.data
    if not data.sample_cache_gib:
        return
    limit_bytes = data.sample_cache_gib * _GIB
    cache: Cache = MemoryCache(limit_bytes)
    if data.sample_cache_folder:
        from fiddlex.data.disk_cache import DiskCache  # takes a module that only Unix has

        name = samples_digest(config, fingerprint)
        cache = DiskCache(absolute(data.sample_cache_folder), name, limit_bytes)
    for number, source in enumerate(sources):
        if isinstance(source, StagedExamples):
            source.store = CachedStore(cache, source=number, counts=counts)


def require_folders(config: Config, sources: Sequence[ExampleSource]) -> None:
    """Opens what `keep_samples` gave and makes `data.share`: a run that cannot use them ends before it compiles."""
    for source in sources:
        if isinstance(source, StagedExamples) and isinstance(source.store, CachedStore):
            source.store.cache.open()
    if config.data.share:
        from fiddlex.data.shared_batches import require_folder  # takes a module that only Unix has

        require_folder(shared_folder(config))


def shared_folder(config: Config) -> Path:
    return absolute(config.data.share)


def samples_digest(config: Config, fingerprint: str) -> str:
    """A name for all that the samples of a run and their numbers follow from, as 24 hexadecimal digits."""
    without = [*paths(Config, NOT_EXAMPLES | NOT_SAMPLES)]
    if not is_megatron(config.data.source):
        without.append("data.seed")
    return _digest(config, fingerprint, without=without)


def batches_digest(config: Config, fingerprint: str, *, rows: Sequence[int], left_out: Sequence[int] = ()) -> str:
    """A name for all that the batches which this process makes follow from, as 24 hexadecimal digits."""
    return _digest(
        config, fingerprint, without=[*paths(Config, NOT_EXAMPLES)], rows=list(rows), left_out=list(left_out)
    )


def _digest(config: Config, fingerprint: str, *, without: Sequence[str], **more: Any) -> str:
    data = {name: value for name, value in dataclasses.asdict(config.data).items() if f"data.{name}" not in without}
    facts = {
        "data": data,
        "fingerprint": fingerprint,
        "files": _files(config.data.source),  # the fingerprint is made of parts of the data alone
        "model": [config.model.task, config.model.seq_len, config.model.vocab_size],
        "tokenizer": tokenizer_digest(config.data.tokenizer),
        "version": fiddlex.__version__,
        **more,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _files(source: str) -> list[Any]:
    """Names, sizes and times of change of the files of a source."""
    path = source.partition(":")[2]
    if is_megatron(source):
        paths = [f"{prefix}.bin" for _, prefix in parse_source("data.source", source)]
    else:
        paths = [path] if path else []
    return [[each, file_states(absolute(each))] for each in paths]
