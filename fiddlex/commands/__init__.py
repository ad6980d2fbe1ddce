"""The sub-commands of `fiddlex`: each module here is one, with its docstring, flags and `main`.

`fiddlex.commands.train` is `fiddlex train`. A module defines absl flags as it is imported, so a process imports only
the module of the sub-command that it runs. A sub-command that takes an argument without a flag says what it is in
`ARGUMENT`, what it may be in `ARGUMENT_CHOICES`, and how many more may follow in `MORE_ARGUMENTS`; one that starts
another program, named after `--`, sets `TAKES_PROGRAM`.
"""

import ast
import importlib.resources
from collections.abc import Iterator


def summaries() -> Iterator[tuple[str, str]]:
    """Yields each sub-command's name and the first line of its docstring, in alphabetical order; imports no module."""
    files = importlib.resources.files(__name__).iterdir()
    for file in sorted(files, key=lambda file: file.name):
        if file.name.endswith(".py") and not file.name.startswith("_"):
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            yield file.name.removesuffix(".py"), docstring.partition("\n")[0]
