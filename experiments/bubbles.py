"""`fiddlex bubbles` as a script: `fiddlex/commands/bubbles.py` has what it does and its flags."""

from fiddlex.commands.bubbles import main
from fiddlex.terminal.command_line import run

if __name__ == "__main__":
    run(main)
