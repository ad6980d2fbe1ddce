"""`fiddlex schedule` as a script: `fiddlex/commands/schedule.py` has what it does and its flags."""

from fiddlex.commands.schedule import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
