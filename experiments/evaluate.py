"""`fiddlex evaluate` as a script: `fiddlex/commands/evaluate.py` has what it does and its flags."""

from fiddlex.commands.evaluate import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
