"""Shows by fault injection that the tests notice wrong code: each mutation of fiddlex must make a test fail.

    python -m tests.mutations                           # all, half an hour or more
    python -m tests.mutations --only='dropout-*'        # some
    python -m tests.mutations --output=results.jsonl    # and a line of JSON for each as soon as it is known

Works on a copy of the working tree (what git tracks, and what is neither tracked nor ignored), so that nothing in the
repository changes. The tests that mutations name run once as they are and must pass; then each mutation is applied and
its own tests run until the first fails. Only the default tier counts: tests marked `long` do not run. Progress goes to
standard error, a table in Markdown to standard output.

Ends with status 1 when a mutation is not caught, with 2 when the list is wrong or the tests fail without a mutation.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = ("-x", "-q", "-n", "0", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "tests.mutations.plugin")
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # statuses of pytest; interrupted is a test file that cannot be imported
LIMIT_S = 300.0  # of a mutation's tests; a mutation whose tests run longer counts as not caught
_NO_PROGRAM = ("NameError", "SyntaxError", "IndentationError")
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)


class ListError(Exception):
    """Something is wrong with the list of mutations or with the tests as they are; the message is shown to the user."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a mutation.

    Attributes:
      mutation: its name.
      file: that it changed.
      caught_by: node id of the test that failed first, or how pytest's process died; None when no test failed.
      message: what the test said, cut short.
      seconds: that its tests took, from the start of pytest's process to its end.
    """

    mutation: str
    file: str
    caught_by: str | None
    message: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="a mutation, or a pattern such as 'dropout-*'")
    parser.add_argument("--output", metavar="PATH", type=pathlib.Path, help="where lines of JSON go; replaced")
    flags = parser.parse_args(arguments)
    try:
        results = run(chosen(flags.only), flags.output)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(results))
    missed = [result.mutation for result in results if result.caught_by is None]
    tell(f"{len(results) - len(missed)} of {len(results)} mutations were caught.")
    if missed:
        tell(f"Not caught: {', '.join(missed)}.")
    return int(bool(missed))


def chosen(patterns: Iterable[str] | None) -> list[Mutation]:
    """The mutations that some patterns name, all for None.

    Raises:
      ListError: when a pattern names none.
    """
    if patterns is None:
        return list(MUTATIONS)
    found: dict[str, Mutation] = {}
    for pattern in patterns:
        matching = [each for each in MUTATIONS if fnmatch.fnmatchcase(each.name, pattern)]
        if not matching:
            names = "\n  ".join(each.name for each in MUTATIONS)
            raise ListError(f"--only={pattern} names no mutation. There are\n  {names}")
        found |= {each.name: each for each in matching}
    return list(found.values())


def run(mutations: Sequence[Mutation], output: pathlib.Path | None = None) -> list[Result]:
    """Runs the tests without a mutation, and then with one after another.

    Raises:
      ListError: when a mutation's text does not occur once, or its tests are not there or fail without it.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = pathlib.Path(folder)
        copy_tree(ROOT, root)
        for mutation in mutations:
            mutated(mutation, root)
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        tell(f"The tests of {len(mutations)} mutations as they are …")
        start_s = time.monotonic()
        done = run_tests(tests, root)
        if done.returncode != PASSED:
            raise ListError(f"{done.stdout}{done.stderr}\nWithout any mutation these tests must pass.")
        tell(f"… pass in {time.monotonic() - start_s:.0f} s.")
        results = []
        with output.open("w", encoding="utf-8") if output else contextlib.nullcontext() as lines:
            for number, mutation in enumerate(mutations, start=1):
                results.append(result := run_mutation(mutation, root))
                by = result.caught_by or "NOT CAUGHT"
                tell(f"{number}/{len(mutations)} {mutation.name}: {by} ({result.seconds:.1f} s)")
                if lines:
                    print(json.dumps(dataclasses.asdict(result)), file=lines, flush=True)
    return results


def copy_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the files of a working tree that git tracks, and those that it neither tracks nor ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (source / name).is_file():  # not one that was removed, nor a repository within this one
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def mutated(mutation: Mutation, root: pathlib.Path) -> str:
    """The mutated text of a mutation's file.

    Raises:
      ListError: when there is no such file, or its text does not occur in it once.
    """
    try:
        return mutation.applied((root / mutation.file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ListError(str(error)) from error


def run_mutation(mutation: Mutation, root: pathlib.Path) -> Result:
    """Applies a mutation, runs its tests until one fails, and restores the file.

    Raises:
      ListError: when its tests are not there.
    """
    path = root / mutation.file
    original, changed = path.read_text(encoding="utf-8"), mutated(mutation, root)
    path.write_text(changed, encoding="utf-8")
    start_s = time.monotonic()
    try:
        done = run_tests(mutation.tests, root, limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess([], PASSED, "", "")
    finally:
        path.write_text(original, encoding="utf-8")
    seconds = time.monotonic() - start_s
    first = _SUMMARY.search(done.stdout)
    caught_by, message = (first[1], first[2] or "") if first else (None, "")
    if done.returncode < 0:
        caught_by = caught_by or f"the process died of signal {-done.returncode}"
    elif done.returncode not in (PASSED, FAILED, INTERRUPTED):
        raise ListError(f"mutation {mutation.name}: its tests cannot be run.\n{done.stdout}{done.stderr}")
    if message.startswith(_NO_PROGRAM):  # any test would fail
        raise ListError(f"mutation {mutation.name}: what it makes of {mutation.file} does not run. {message}")
    return Result(mutation.name, mutation.file, caught_by, message, round(seconds, 1))


def run_tests(
    tests: Sequence[str], root: pathlib.Path, *, limit_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs pytest in a copy of the repository, whose folder of compiled programs the runs share.

    Raises:
      subprocess.TimeoutExpired: when the tests take longer than `limit_s`.
    """
    # Programs that tests start import the copy too. No bytecode: a file that changes back and forth within a second,
    # and not in size, would be taken for the one that was compiled.
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "240"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
    return subprocess.run(
        command, cwd=root, env=environment, check=False, capture_output=True, text=True, timeout=limit_s
    )


def table(results: Iterable[Result]) -> str:
    """The results as a Markdown table."""
    rows = ["| mutation | file | caught by | seconds |", "|---|---|---|---:|"]
    for each in results:
        by = f"`{each.caught_by}`" if each.caught_by else "**not caught**"
        rows.append(f"| {each.mutation} | {each.file} | {by} | {each.seconds:.1f} |")
    return "\n".join(rows)


def tell(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
