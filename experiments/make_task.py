"""`fiddlex make_task` as a script: `fiddlex/commands/make_task.py` has what it does and its flags."""

from fiddlex.commands.make_task import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
