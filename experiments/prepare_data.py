"""`fiddlex prepare_data` as a script: `fiddlex/commands/prepare_data.py` has what it does and its flags."""

from fiddlex.commands.prepare_data import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
