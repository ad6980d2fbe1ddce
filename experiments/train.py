"""`fiddlex train` as a script: `fiddlex/commands/train.py` has what it does and its flags."""

from fiddlex.commands.train import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
