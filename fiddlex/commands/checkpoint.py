"""Lists the checkpoints of a workdir, verifies that they are what was saved, or shows how two of them differ.

    fiddlex checkpoint list WORKDIR
    fiddlex checkpoint verify WORKDIR [STEP]
    fiddlex checkpoint diff WORKDIR STEP STEP2
    fiddlex checkpoint diff WORKDIR STEP WORKDIR2 STEP2

`verify` reads each file and each array of one checkpoint, or of all, and ends with status 1 if anything is damaged.
`diff` ends with status 0 whether the two differ or not, and with 1 if an array that it compares is damaged. They need
no accelerator and no config, and memory for the largest array or two. docs/checkpoints.md explains what each prints.
"""

import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

from fiddlex.config import rules
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.terminal.readable import counted, readable_size, readable_time

if TYPE_CHECKING:
    from fiddlex.train.run.checkpoints.differences import ArrayDifference, Difference
    from fiddlex.train.run.checkpoints.inventory import Entry, Verdict

ARGUMENT_CHOICES = ("list", "verify", "diff")
ARGUMENT = f"what to do: {', '.join(ARGUMENT_CHOICES)}"
MORE_ARGUMENTS = 4

_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")

logger = logging.getLogger("fiddlex.checkpoint")

_PROGRESS_S = 2.0  # seconds between two lines that tell how much was read


def main(argv: list[str]) -> None:
    """Prints what the first argument names."""
    action, *arguments = argv[1:]
    usage = {"list": "WORKDIR", "verify": "WORKDIR [STEP]", "diff": "WORKDIR STEP [WORKDIR2] STEP2"}
    numbers = {"list": (1,), "verify": (1, 2), "diff": (3, 4)}
    if action not in usage:
        raise ConfigError(f"there is no {action!r} of checkpoints; use {', '.join(ARGUMENT_CHOICES)}.")
    if len(arguments) not in numbers[action]:
        raise ConfigError(f"{action} takes {usage[action]}, as in fiddlex checkpoint {action} {usage[action]}.")
    for argument in arguments:
        rules.local_path(action, argument)
    if action == "list":
        _list(pathlib.Path(arguments[0]))
    elif action == "verify":
        _verify(pathlib.Path(arguments[0]), _step(arguments[1]) if arguments[1:] else None)
    else:
        workdir, step, *others = arguments
        second = others[0] if others[1:] else workdir
        _diff((workdir, _step(step)), (second, _step(others[-1])))


def _list(workdir: pathlib.Path) -> None:
    from fiddlex.train.run.checkpoints.inventory import entries

    found = list(entries(workdir))
    if not found and not (workdir / "config.json").exists():
        raise CheckpointError(f"{workdir} has no checkpoints and no config.json. Name the --workdir of a run.")
    if _FORMAT.value == "json":
        print(json.dumps({"checkpoints": [entry.facts() for entry in found]}))
        return
    for entry in found:
        print(_described(entry, workdir))
    if not found:
        print(f"{workdir} has no checkpoint yet.")


def _described(entry: "Entry", workdir: pathlib.Path) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.written)) if entry.written else "without files"
    line = f"{entry.path.relative_to(workdir)}: {entry.state}, {readable_size(entry.num_bytes)}, {written}"
    if entry.reason:
        return f"{line}\n  cannot be read: {entry.reason}"
    if entry.step is None:
        return line
    parts = ", ".join(f"{part} ({', '.join(entry.dtypes[part])})" for part in entry.parts)
    number = f" of {counted(entry.num_parameters, 'parameter')}" if entry.num_parameters is not None else ""
    return f"{line}\n  step {entry.step}{number}: {parts}"


def _verify(workdir: pathlib.Path, step: int | None) -> None:
    from fiddlex.train.run.checkpoints.inventory import finished, verify

    verdicts: list[Verdict] = []
    for path in finished(workdir, step):
        verdict = verify(path, _progress(f"{path.relative_to(workdir)}: read"))
        if not path.is_dir():
            logger.info("%s was deleted meanwhile, by its run.", path)
            continue
        verdicts.append(verdict)
        if _FORMAT.value == "text":
            print(_judged(verdict, workdir), flush=True)
    if _FORMAT.value == "json":
        print(json.dumps({"checkpoints": [verdict.facts() for verdict in verdicts]}))
    if damaged := [str(verdict.path) for verdict in verdicts if not verdict.whole]:
        raise CheckpointError(
            f"{len(damaged)} of {counted(len(verdicts), 'checkpoint')} {'is' if len(damaged) == 1 else 'are'} damaged: "
            f"{', '.join(damaged)}. {_remedy(workdir, verdicts)}"
        )


def _remedy(workdir: pathlib.Path, verdicts: "list[Verdict]") -> str:
    """What to do about damaged checkpoints; a run goes on from those in `checkpoints/` alone, and not from `best/`."""
    from fiddlex.train.run.checkpoints.inventory import RESUMABLE, finished

    if any(verdict.whole and verdict.path.parent.name == RESUMABLE for verdict in verdicts):
        return "Put back an intact copy; until then fiddlex goes on from the newest whole one."
    judged = {verdict.path for verdict in verdicts}
    if any(path.parent.name == RESUMABLE and path not in judged for path in finished(workdir)):
        return (
            "Put back an intact copy; until then fiddlex goes on from the newest of the others that is whole. To see "
            "whether one is, run fiddlex checkpoint verify without a step."
        )
    return (
        f"The run cannot go on, since no checkpoint in {RESUMABLE}/ is whole. Put back an intact copy, or choose a new "
        "--workdir to start again."
    )


def _judged(verdict: "Verdict", workdir: pathlib.Path) -> str:
    from fiddlex.train.run.checkpoints.file_digests import LIST

    name = verdict.path.relative_to(workdir)
    files = counted(verdict.num_files, "file") if verdict.num_files else "files without a list of digests"
    if LIST in verdict.damaged_files:
        files = "files not compared"
    rate = verdict.num_bytes / max(verdict.seconds, 1e-9)
    arrays = f"{counted(verdict.num_arrays, 'array')} of {readable_size(verdict.num_bytes)}"
    read = f"{arrays}, {files}, {readable_time(verdict.seconds)}, {readable_size(rate)}/s"
    lines = [f"{name}: {'whole' if verdict.whole else 'DAMAGED'}; {read}"]
    lines += [f"  file {file}: {reason}" for file, reason in verdict.damaged_files.items()]
    lines += [f"  {'array ' * (name != 'meta')}{name}: {reason}" for name, reason in verdict.damaged_arrays.items()]
    lines += _unreadable(verdict)
    return "\n".join(lines)


def _unreadable(verdict: "Verdict") -> list[str]:
    """A line for each part of a checkpoint of which arrays cannot be read."""
    lines = []
    reasons = verdict.unreadable_arrays
    for part in dict.fromkeys(name.partition(".")[0] for name in reasons):
        names = [name for name in reasons if name.startswith(f"{part}.")]
        is_known = any(file.startswith(f"{part}/") for file in verdict.damaged_files)
        why = "because of a file above" if is_known else f"of {names[0]}: {reasons[names[0]]}"
        lines.append(f"  {part}/: {counted(len(names), 'array')} cannot be read, {why}")
    return lines


def _diff(first: tuple[str, int], second: tuple[str, int]) -> None:
    from fiddlex.train.run.checkpoints.differences import difference
    from fiddlex.train.run.checkpoints.inventory import finished

    a, b = (finished(pathlib.Path(workdir), step)[0] for workdir, step in (first, second))
    found = difference(a, b, _progress("compared"))
    if _FORMAT.value == "json":
        print(json.dumps(found.facts()))
    else:
        print("\n".join([f"{a} and {b}:", *_differences(found)]), flush=True)
    if number := sum(map(len, found.damaged)):
        raise CheckpointError(
            f"{counted(number, 'array')} {'is' if number == 1 else 'are'} not what was saved, so not all differences "
            "are those of training. Run fiddlex checkpoint verify to see which file is damaged."
        )


def _differences(found: "Difference") -> list[str]:
    lines = [f"  {name}: {_short(old)} and {_short(new)}" for name, (old, new) in found.meta.items()]
    for side, names in zip(("first", "second"), found.only, strict=True):
        lines += [f"  {name}: in the {side} alone" for name in names]
    lines += [_compared(each) for each in found.arrays if not each.equal]
    for side, reasons in zip(("first", "second"), found.damaged, strict=True):
        lines += [f"  {name}: DAMAGED in the {side}: {reason}" for name, reason in reasons.items()]
    equal = sum(each.equal for each in found.arrays)
    verb = "is" if equal == 1 else "are"
    return [*lines, f"  {equal} of {counted(len(found.arrays), 'array')} that both have {verb} equal bit for bit"]


def _compared(each: "ArrayDifference") -> str:
    line = f"  {each.name}:"
    if each.dtypes[0] != each.dtypes[1]:
        line += f" {' and '.join(each.dtypes)};"
    if not each.comparable:
        return f"{line} shapes {each.shapes[0]} and {each.shapes[1]} cannot be compared"
    verb = "differs" if each.num_different == 1 else "differ"
    return (
        f"{line} {each.num_different:,} of {counted(each.num_elements, 'element')} {verb}, by at most "
        f"{each.max_absolute:.3g} (relative {each.max_relative:.3g})"
    )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]} … {text[-16:]}"


def _progress(what: str) -> Callable[[str, int], None]:
    """What logs from time to time how many bytes were read, and the name of the file or array that was read last."""
    total, last = 0, time.monotonic()

    def told(name: str, size: int) -> None:
        nonlocal total, last
        total += size
        if time.monotonic() - last > _PROGRESS_S:
            last = time.monotonic()
            logger.info("%s %s … (%s)", what, readable_size(total), name)

    return told


def _step(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ConfigError(f"{text[:40]!r} is not the step of a checkpoint, which is a number such as 1000.")
    return int(text)
