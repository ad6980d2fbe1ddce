"""The directory of a run: its files, and whether a config may continue the run in it.

The directory holds `config.json` (resolved), `metrics.jsonl`, `goodput.jsonl`, `checkpoints/` and `tensorboard/`;
`schedule.csv`, the table of the run's schedule (`kept_schedule.py`); `registered.json`, which tells what has registered
the run's family and schedule (`registered.py`); `data.json`, digests by which a run knows its data under another path;
`stacks/` if a step took too long (`faults/watchdog.py`); and of a run that ends when it stops improving `best/` and
`best.json` (`best.py`).

Invariants: a workdir can be moved, and its run evaluated and sampled from in any folder and without the schedule's
source; and no function that `config.json` names is run.
"""

import contextlib
import dataclasses
import json
import logging
import operator
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from fiddlex.cluster import processes
from fiddlex.cluster.shared_files import not_seen_by
from fiddlex.config import Config
from fiddlex.config.families import family
from fiddlex.config.fields import RUN, WEIGHTS, paths
from fiddlex.config.overrides import replaced
from fiddlex.config.paths import absolute_paths
from fiddlex.config.values.every import AUTO
from fiddlex.config.values.schedule_source import Kind, source_of
from fiddlex.data.tokenizers import tokenizer_digest
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.files.small_files import read_object, read_small
from fiddlex.files.whole_files import write_whole
from fiddlex.interop.folder import check_window
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.text import to_csv
from fiddlex.train.run import registered
from fiddlex.train.run.checkpoints.kept_steps import check_keeps
from fiddlex.train.run.kept_schedule import TABLE, keep_other_table, with_order, with_table

logger = logging.getLogger(__name__)

TOKENS = "tokens"  # subdirectory in which several processes keep the tokens of text
DIGESTS = "data.json"  # by the field that names data: what identifies them, whatever their path (`Dataset.digests`)
PROBE = ".probe"  # file by which the processes of a run find out whether they share a workdir
ORIGINAL = "huggingface"  # subdirectory with what is kept of the folder of transformers that the weights came from
OWN_TOKENIZER = f"{ORIGINAL}/tokenizer.json"

_PROGRAMS = "train.compilation_cache"  # which belongs to the machine: a workdir must not name a folder of machine code


@contextlib.contextmanager
def claimed(workdir: Path, config: Config, *, digests: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Locks the directory for one training run, and creates it if needed; the first process does it for all.

    All processes check that they see what the first one has written there. Data with the digest (`Dataset.digests`) of
    the run's former data may have another path.

    Raises:
      CheckpointError: when the directory cannot be written or some processes do not see its files, a file in it is a
        link, a pipe or a device, or its run differs in a field with the role RUN, SHAPES or MEANING or in the content
        of its data.
      ConfigError: when another process is training in it, or the run would delete what `train.keep_every` has kept.
    """
    if not processes.is_first():
        _check_shared(workdir)
        yield
        return
    with contextlib.ExitStack() as stack:
        with writing(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
            _check_files(workdir)
            try:
                stack.enter_context(FileLock(workdir / ".lock", timeout=0))
            except Timeout as error:
                raise ConfigError(  # a supervisor must not try this again
                    f"Another process is training in --workdir={workdir}. Wait for it, stop it, or choose another "
                    "--workdir."
                ) from error
            _check_checkpoints(workdir, with_table(config, workdir), digests)
        _check_shared(workdir)
        yield


def _check_files(workdir: Path) -> None:
    """Raises CheckpointError at a link, through which a run would write, and at pipes and devices, which block it."""
    for path in workdir.iterdir():
        if path.is_dir():
            continue
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {os.readlink(path)}. A run would write to that file: in a --workdir only folders "
                "may be links, such as checkpoints/ on another disk. Put the file itself there, or remove the link."
            )
        if not path.is_file():
            raise CheckpointError(
                f"{path} is a pipe or a device, and a --workdir has files and folders alone. Remove it, or put an "
                "intact copy of the file in its place."
            )


def _check_shared(workdir: Path) -> None:
    """Raises CheckpointError when some processes do not see a file that the first one writes into the directory."""
    if processes.num_processes() == 1:
        return
    probe = workdir / PROBE

    def write() -> str:
        text = f"{secrets.token_hex(8)} {socket.gethostname()}"
        with writing(workdir):
            probe.write_text(text, encoding="utf-8")
        return text

    text = processes.told_by_first("probe of the workdir", write)
    blind = not_seen_by("look at the probe of the workdir", lambda: probe.read_text(encoding="utf-8") == text)
    if processes.is_first():
        probe.unlink(missing_ok=True)
    if blind:
        raise CheckpointError(
            f"--workdir={workdir} is not shared by all hosts: rank 0 ({text.partition(' ')[2]}) has written a file "
            f"there, and {blind} cannot read it. Name a directory of a file system that all hosts share, under the "
            "same path."
        )


@contextlib.contextmanager
def writing(path: Path, *, named_by: str = "--workdir") -> Iterator[None]:
    """Turns an OSError in the body, which writes to `path` in the directory of a flag, into a CheckpointError."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        wanted = Path(error.filename or path)
        found = next((each for each in (wanted, *wanted.parents) if os.path.lexists(each)), wanted)
        raise CheckpointError(
            f"Cannot write to {path}: {found} is a file or a broken link where a directory must be. Move it away and "
            f"run the same command again, or choose another {named_by}."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"Cannot write to {path}: {error.strerror or error}. Make room or permit writing there and run the same "
            f"command again, or choose another {named_by}."
        ) from error


def _check_checkpoints(workdir: Path, config: Config, digests: Mapping[str, str]) -> None:
    checkpoints = workdir / "checkpoints"
    if not checkpoints.exists() or not any(checkpoints.iterdir()):
        return
    if not (workdir / "config.json").exists():
        raise CheckpointError(
            f"--workdir={workdir} has checkpoints and no config.json that tells of what. Put config.json back, or "
            "choose a new --workdir to start another run."
        )
    saved = read_config(workdir)
    if [path.name for path in checkpoints.iterdir()] == ["0"]:  # weights that no step has changed
        check_same_shapes(saved, config, workdir)
    else:
        check_same_run(saved, config, workdir, digests)
    check_keeps(saved.train, config.train, checkpoints)


def write_config(
    workdir: Path, config: Config, *, schedule: Schedule, digests: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Writes `config.json`, in which paths are absolute, what belongs to it, and `data.json` if there are digests."""
    with writing(workdir):
        table = to_csv(schedule)
        keep_other_table(workdir, table)
        write_whole(workdir / TABLE, table)
        if source_of(config.pipeline.schedule).kind is Kind.TABLE:
            config = replaced(config, {"pipeline.schedule": f"file:{TABLE}"})
        config = with_order(config, schedule)
        if digests:
            write_whole(workdir / DIGESTS, json.dumps(dict(digests), indent=2) + "\n")
        registered.keep(config, workdir)
        write_whole(workdir / "config.json", absolute_paths(config).to_json())


def read_config(workdir: Path, *, named_by: str = "--workdir") -> Config:
    """The config of the run in a workdir; a schedule from a file, and a tokenizer that was converted, are those in it.

    What the run had registered is registered here too (`fiddlex.train.run.registered.find`, which tells the errors).

    `named_by` is the flag or field that names the directory, for error messages.
    """
    path = workdir / "config.json"
    if workdir.is_file():
        raise CheckpointError(f"{named_by}={workdir} is a file. Name the directory of a training run.")
    try:
        text = read_small(path)
        if '"architectures"' in text or str(workdir).startswith("hf:"):
            folder = str(workdir).removeprefix("hf:")
            raise CheckpointError(
                f"{named_by}={workdir} is a folder of transformers. Convert it to a workdir first: fiddlex "
                f"convert --source=hf:{folder} --target=WORKDIR"
            )
        saved = Config.from_json(text).without_unused()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: {named_by}={workdir} is not the directory of a training run. "
            "Train one with fiddlex train --config=… --workdir=…"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}\nPut back an intact copy, or name another directory with {named_by}."
        ) from error
    registered.find(saved, workdir)
    saved = replaced(with_table(saved, workdir), {_PROGRAMS: AUTO})
    own = workdir / OWN_TOKENIZER  # where it is now: the workdir may have been moved
    is_own = saved.data.tokenizer.endswith(f"/{OWN_TOKENIZER}") and own.is_file()
    return replaced(saved, {"data.tokenizer": os.path.abspath(own)}) if is_own else saved


def check_same_run(
    saved: Config, config: Config, workdir: Path, digests: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises CheckpointError, listing every difference, when `config` cannot continue the run of `saved`.

    Differences with which a run may continue are logged, such as another path of data with the digest that the workdir
    has kept. `config` may omit `train.init_from`, since the run has already started; another value of it means another
    run.
    """
    saved, config = absolute_paths(saved), absolute_paths(config)
    kept = _kept_digests(workdir)
    same = {name for name, digest in digests.items() if digest == kept.get(name)}
    if not (saved.data.eval_source or config.data.eval_source) and "data.eval_source" not in same:
        same.discard("data.source")  # what it holds out is not what the run is evaluated on
    fixed = [path for path in paths(Config, RUN | WEIGHTS) if path not in same]
    if config.train.init_from:
        fixed.append("train.init_from")
    if different := described_differences(fixed, saved, config):
        remedy = "Set these fields back"
        if changed := _changed_data(different, kept, digests):
            different, remedy = changed, "Put the former data there, or set these fields back,"
        raise CheckpointError(
            f"--workdir={workdir} holds checkpoints of another run:\n  "
            + "\n  ".join(different)
            + f"\n{remedy} to go on with it, or choose a new --workdir to start another."
        )
    held_out = "data.eval_source names" if config.data.eval_source else "data.source holds out"
    what = {"data.tokenizer": "data.tokenizer names", "data.eval_source": held_out}
    if not config.data.eval_source and digests.get("data.source") != kept.get("data.source"):
        del what["data.eval_source"]  # the checkpoint tells of other data to train on
    if other := [
        text for name, text in what.items() if name in digests and digests[name] != kept.get(name, digests[name])
    ]:
        raise CheckpointError(
            f"--workdir={workdir} holds checkpoints of a run with other data: what {' and what '.join(other)} has "
            "changed since. Put the former content back to go on with it, or choose a new --workdir to start another."
        )
    names = [f"{section}.{field}" for section, fields in dataclasses.asdict(config).items() for field in fields]
    names.remove(_PROGRAMS)
    changed = [f"{name} {old!r} → {new!r}" for name, old, new in _differences(names, saved, config)]
    if changed:
        logger.info("The config has changed since this run was last started: %s.", ", ".join(changed))


def warn_of_changed_data(saved: Config, config: Config, workdir: Path, digests: Mapping[str, str]) -> None:
    """Logs what has changed since the run of `saved`, of the data that `config` names as the run does."""
    if described_differences([path for path in paths(Config, RUN) if path.startswith("data.")], saved, config):
        return  # the user asks for other data
    kept = _kept_digests(workdir)
    what = {"data.source": "trained on", "data.eval_source": "held out"}
    if changed := [text for name, text in what.items() if digests[name] != kept.get(name, digests[name])]:
        logger.warning(
            "%s is not what it was: what the run of %s %s has changed since.",
            config.data.source,
            workdir,
            " and ".join(changed),
        )


def _changed_data(different: list[str], kept: Mapping[str, str], digests: Mapping[str, str]) -> list[str]:
    """Differences with the fingerprints of the data, if they are all other paths of data whose contents differ too."""
    described = list[str]()
    if digests.get("data.tokenizer") != kept.get("data.tokenizer"):
        return []  # fingerprints are of tokens
    for text in different:
        name = text.partition(" is ")[0]
        held_out = name == "data.source" and digests.get(name) == kept.get(name)
        key = "data.eval_source" if held_out else name
        (was_kind, _, was), (kind, _, now) = (each.get(key, "").partition(" ") for each in (kept, digests))
        if name not in ("data.source", "data.eval_source") or kind != was_kind or not (was and now):
            return []  # contents may differ because of the other field or kind
        what = "what it holds out differs" if held_out else "its contents differ"
        described.append(f"{text}, and {what} too: fingerprint {now}, was {was}")
    return described


def _kept_digests(workdir: Path) -> dict[str, str]:
    """What `DIGESTS` has; nothing in workdirs of earlier versions, nor where it is damaged, which is logged."""
    path = workdir / DIGESTS
    if not path.exists():
        return {}
    try:
        return {str(name): str(digest) for name, digest in read_object(path).items()}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): data that have changed or moved are not known again.", path, error)
        return {}


def check_same_shapes(saved: Config, config: Config, workdir: Path) -> None:
    """Raises CheckpointError if weights of `saved` do not fit the model of `config`, or the tokenizer has changed."""
    rotary = "rope_base" in family(saved.model.family).fields  # no weight depends on the length of sequences
    fields = [path for path in paths(Config, WEIGHTS) if not (rotary and path == "model.seq_len")]
    if different := described_differences(fields, saved, config):
        remedy = "Leave these fields as they are there."
        if (saved.model.task, saved.data.classes) != (config.model.task, config.data.classes):
            remedy += (
                " To do something else with what it has learnt, fine-tune it first: fiddlex train with "
                f"--config.model.objective={config.model.task}, --config.train.init_from={workdir} and a --workdir of "
                "its own."
            )
        listed = "\n  ".join(different)
        raise CheckpointError(f"The weights in --workdir={workdir} are those of another model:\n  {listed}\n{remedy}")
    check_original_window(workdir, config)
    kept, tokenizer = _kept_digests(workdir).get("data.tokenizer"), config.data.tokenizer
    if kept and tokenizer == saved.data.tokenizer and kept != tokenizer_digest(tokenizer) and os.path.exists(tokenizer):
        raise CheckpointError(
            f"The run in --workdir={workdir} was trained on tokens of another tokenizer: what data.tokenizer="
            f"{tokenizer} names has changed since. Put the former file back, or name it with --config.data.tokenizer."
        )


def check_original_window(workdir: Path, config: Config) -> None:
    """Raises CheckpointError when sequences exceed the sliding window of the model that the weights came from."""
    if (workdir / ORIGINAL / "config.json").exists():
        check_window(workdir / ORIGINAL, config)


def described_differences(names: Iterable[str], saved: Config, config: Config) -> list[str]:
    """'model.num_layers is 4, was 2' for each of the fields with these paths that differs between the two configs."""
    compared, described = paths(Config, RUN | WEIGHTS), list[str]()
    for path in names:
        old, new = map(operator.attrgetter(compared.get(path, path)), (saved, config))
        # A derived size that differs only because the size it is derived from differs is left out.
        if old == new or (path == "model.ffn_size" and saved.model.ffn_size == config.model.ffn_size):
            continue
        if path == "data.labels":
            old, new = saved.data.labels, config.data.labels
        described.append(f"{path} is {new!r}, was {old!r}")
    return described


def _differences(names: Iterable[str], saved: Config, config: Config) -> list[tuple[str, Any, Any]]:
    """Name, value in `saved` and value in `config` of each field that differs."""
    values = ((name, *map(operator.attrgetter(name), (saved, config))) for name in names)
    return [(name, old, new) for name, old, new in values if old != new]
