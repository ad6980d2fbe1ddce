"""`fiddlex checkpoint` as a script: `fiddlex/commands/checkpoint.py` has what it does and its flags."""

from fiddlex.commands.checkpoint import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
