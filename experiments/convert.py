"""`fiddlex convert` as a script: `fiddlex/commands/convert.py` has what it does and its flags."""

from fiddlex.commands.convert import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
