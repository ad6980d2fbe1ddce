"""`fiddlex what_if` as a script: `fiddlex/commands/what_if.py` has what it does and its flags."""

from fiddlex.commands.what_if import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
