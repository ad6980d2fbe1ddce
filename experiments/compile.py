"""`fiddlex compile` as a script: `fiddlex/commands/compile.py` has what it does and its flags."""

from fiddlex.commands.compile import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
