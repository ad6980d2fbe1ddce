"""`fiddlex launch` as a script: `fiddlex/commands/launch.py` has what it does and its flags."""

from fiddlex.commands.launch import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
