"""Text of shell scripts: the head that all have, and words quoted so that bash reads them as they are."""

import shlex
from collections.abc import Mapping, Sequence

HEADER = """\
#!/usr/bin/env bash
# {title}.
# Made by fiddlex launch. To start it: {submit}.
"""


def assignments(environment: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def command_line(*groups: Sequence[str], task: Sequence[str]) -> str:
    """A command of bash, with a line for each group of words, and for each word of the task's program."""
    program = task.index("--") + 1
    lines = [*groups, task[:program], *([word] for word in task[program:])]
    return " \\\n    ".join(map(shlex.join, lines))
