"""`fiddlex plan` as a script: `fiddlex/commands/plan.py` has what it does and its flags."""

from fiddlex.commands.plan import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
