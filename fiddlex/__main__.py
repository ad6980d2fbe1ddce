"""The command `fiddlex`, also as `python -m fiddlex`: runs the sub-command that its first argument names.

Invariant: what needs no sub-command (the list, the version, a mistake in the name) imports neither jax nor absl.
"""

import difflib
import importlib
import os
import sys

from fiddlex.commands import summaries
from fiddlex.terminal.streams import print_any_text

_FAILURE_STATUS, _USAGE_STATUS, _INTERRUPTED_STATUS = 1, 2, 130


def main() -> None:
    """Runs the sub-command with the arguments after its name; without arguments lists the sub-commands.

    A shell that completes a line, of which it tells in these variables, gets the candidates instead.
    """
    if "_ARGCOMPLETE" in os.environ and "COMP_LINE" in os.environ:
        from fiddlex.completion import complete

        complete(os.environ["COMP_LINE"])
    print_any_text()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        _print(_listing())
        return
    if name == "--version":
        from fiddlex.environment import describe

        try:
            _print(describe())
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED_STATUS)
        return
    known = [command for command, _ in summaries()]
    if name not in known:
        sys.stderr.write(f"fiddlex: {_unknown(name, known)}\n")
        sys.exit(_USAGE_STATUS)
    sys.argv = [f"fiddlex {name}", *arguments]  # messages begin with the program's name
    try:
        module = importlib.import_module(f"fiddlex.commands.{name}")
        from fiddlex.terminal.command_line import run
    except KeyboardInterrupt:  # `run` handles it later
        sys.exit(_INTERRUPTED_STATUS)
    run(module.main)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader of our output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"fiddlex: {error}\n")
        sys.exit(_FAILURE_STATUS)


def _listing() -> str:
    rows = [*summaries()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [
            "fiddlex trains GPT, Llama-type and BERT models with tensor, pipeline and data parallelism.",
            "",
            "usage: fiddlex COMMAND [--flag=value …]",
            "",
            *(f"  {name:<{width}}  {line}" for name, line in rows),
            "",
            "fiddlex COMMAND --help shows the flags of a command, fiddlex --version what a report of a problem needs.",
        ]
    )


def _unknown(name: str, known: list[str]) -> str:
    if difflib.get_close_matches(name.lstrip("-"), ["version"], cutoff=0.8) or name in ("-v", "-V"):
        return f"there is no command {name!r}. Did you mean fiddlex --version?"
    if name.startswith("-"):
        return (
            f"{name} must follow the command that it is a flag of: fiddlex COMMAND {name}. fiddlex lists the commands."
        )
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=3)
    near = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"there is no command {name!r}.{near} Known: {', '.join(known)}."


if __name__ == "__main__":
    main()
