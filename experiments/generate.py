"""`fiddlex generate` as a script: `fiddlex/commands/generate.py` has what it does and its flags."""

from fiddlex.commands.generate import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
