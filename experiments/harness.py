"""`fiddlex harness` as a script: `fiddlex/commands/harness.py` has what it does and its flags."""

from fiddlex.commands.harness import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
